"""Templates into pages: everything inlined, and nothing runs that was not built in."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentbench_kv import __version__
from agentbench_kv.results.files import writing
from agentbench_kv.results.site.answers import family
from agentbench_kv.results.site.contests import kept
from agentbench_kv.results.site.text import number, percent, visible

_MARK = '<meta name="generator" content="kvbench '


class Pages:
    """Writes the pages of one site to a folder; every template sees what is `shared`."""

    def __init__(self, folder: Path, shared: dict[str, Any]) -> None:
        self.folder = folder
        self.written: set[Path] = set()
        self._shared = shared
        self._environment = _environment()

    def write(
        self, name: str, template: str, context: dict[str, Any], scripts: Sequence[str] = ()
    ) -> Path:
        """Render a template to `name`, a path relative to the site's root."""
        path = self.folder / name
        style, theme = _asset("site.css"), _asset("theme.js")
        code = [_asset(script) for script in scripts]
        html = self._environment.get_template(template).render(
            self._shared,
            root="../" * name.count("/"),
            page=name,
            generator=Markup(f'{_MARK}{__version__}">'),
            policy=_policy((theme, *code), style),
            style=style,
            theme=theme,
            scripts=code,
            **context,
        )
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(html, encoding="utf-8", newline="\n")
        self.written.add(path)
        return path

    def drop_stale(self) -> None:
        """Remove pages of an earlier build whose run or task is no longer in the report."""
        for path in (*self.folder.glob("runs/*.html"), *self.folder.glob("tasks/*.html")):
            with writing(path):
                if path not in self.written and _MARK.encode() in path.read_bytes()[:4000]:
                    path.unlink()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("agentbench_kv.results.site"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (visible, percent, number, kept, family)
    environment.filters |= {each.__name__: each for each in filters}
    return environment


@cache
def _asset(name: str) -> Markup:
    """Return a file of the package as it goes between tags; never anything from a run."""
    text = files("agentbench_kv.results.site").joinpath("static", name).read_text("utf-8")
    return Markup(text)


@cache
def _policy(scripts: tuple[str, ...], style: str) -> str:
    """Return a Content-Security-Policy that allows the inlined parts and nothing else."""
    own = f"script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}"
    return f"default-src 'none'; {own}; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
