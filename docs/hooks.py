"""MkDocs hook: what the docs site has from the code, written while the site is built.

A page of `docs/reference` holds a line `<!-- generated: NAME -->` where `GENERATED[NAME]` goes.
Pages without a file in `docs/` (one per command, the change log, schemas) come from `on_files`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from agentbench_kv.cli import VERBS, kvbench
from agentbench_kv.cli.output import AMPLE
from agentbench_kv.engines.base import Capability
from agentbench_kv.methods.base import Method
from agentbench_kv.params import ParamSpec
from agentbench_kv.registry import load_engine, load_method, load_task, names
from agentbench_kv.results.baseline import Baseline
from agentbench_kv.results.frame import OF_RUN, OF_TRIAL, FrameColumn
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.run_info import RunInfo
from agentbench_kv.results.submissions import Manifest
from agentbench_kv.results.summary import Summary

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/notebooks/paper_plots.ipynb"
OF_THE_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
# What is written as JSON, with the file it is the content of.
SCHEMAS: dict[str, tuple[str, Any]] = {
    "run": ("`run.json`: specification, provenance, status", RunInfo),
    "trial": ("a line of `samples.jsonl`", TrialRecord),
    "turn": ("a line of `turns.jsonl`", TurnRecord),
    "summary": ("`summary.json`, and what `kvbench run --json` prints a run", Summary),
    "baseline": ("`baselines/NAME.json`", Baseline),
    "submission": ("`submission.json` of a submission to a leaderboard", Manifest),
}


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table; a cell's bars and line breaks are escaped."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *([_cell(each) for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _code(value: Any) -> str:
    return "" if value in (None, "") else f"`{value}`"


def _parameters(specs: Iterable[ParamSpec], defaults: Callable[[ParamSpec], Any]) -> str:
    rows = ((_code(p.name), _code(defaults(p)), p.allowed(), p.doc) for p in specs)
    return table(["parameter", "default", "allowed", "meaning"], rows)


def common_parameters() -> str:
    """Return the parameters that every method has from the base."""
    return _parameters(Method.parameters().values(), lambda p: p.default)


def methods() -> str:
    """Return a section for each registered method, with presets and the parameters of its own."""
    return "\n\n".join(map(_method, names("method")))


def _method(name: str) -> str:
    cls = load_method(name)
    plain = cls.create("", AMPLE if cls.compresses else None)
    parts = [f"## {name}", f"{cls.summary}." + (f" {cls.source}." if cls.source else "")]
    common = {key: spec.default for key, spec in Method.parameters().items()}
    own = [p for p in cls.parameters().values() if getattr(plain, p.name) != common.get(p.name, p)]
    if own:
        parts.append(_parameters(own, lambda p: getattr(plain, p.name)))
    if cls.presets:
        rows = (
            (_code(f"{name}@{preset}"), ", ".join(_code(f"{k}={v}") for k, v in values.items()))
            for preset, values in cls.presets.items()
        )
        parts.append(table([f"preset (`{cls.default_preset}` by default)", "sets"], rows))
    return "\n\n".join(parts)


def engine_matrix() -> str:
    """Return which engine can do all that a method needs."""
    engines = {name: frozenset(load_engine(name).capabilities) for name in names("engine")}
    rows = []
    for name in names("method"):
        cls = load_method(name)
        needs = cls.create("", AMPLE if cls.compresses else None).needs
        able = ("yes" if needs <= has and not cls.offline else "" for has in engines.values())
        rows.append([f"[{name}](methods.md#{name})", *able])
    return table(["method", *map(_code, engines)], rows)


def engines() -> str:
    """Return what each engine says it can do."""
    has = {name: frozenset(load_engine(name).capabilities) for name in names("engine")}
    rows = (
        [_code(c.value), *("yes" if c in all_ else "" for all_ in has.values())] for c in Capability
    )
    return table(["capability", *map(_code, has)], rows)


def tasks() -> str:
    """Return a section for each registered task, with its settings."""
    parts = []
    for name in names("task"):
        cls = load_task(name)
        parts += [f"## {name}", f"{cls.summary}."]
        if specs := cls.parameters().values():
            parts.append(_parameters(specs, lambda p: p.default))
    return "\n\n".join(parts)


def columns() -> str:
    """Return the columns of `load_results`, first those of the run."""
    return "\n\n".join(
        [
            "## Of the run",
            _columns(OF_RUN),
            "## Of the trial",
            _columns(OF_TRIAL),
        ]
    )


def _columns(found: Iterable[FrameColumn]) -> str:
    return table(
        ["column", "type", "meaning"], ((_code(c.name), c.dtype, c.meaning) for c in found)
    )


def schemas() -> str:
    """Return what each schema is of, and its fields."""
    parts = [
        table(
            ["schema", "of"],
            ((f"[{name}.json](schemas/{name}.json)", what) for name, (what, _) in SCHEMAS.items()),
        )
    ]
    for name, (what, kind) in SCHEMAS.items():
        parts += [f"## {name}", f"{what[:1].upper()}{what[1:]}.", _fields(schema(kind))]
    return "\n\n".join(parts)


def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a record: msgspec's of a struct, pydantic's of a model."""
    document: dict[str, Any]
    if issubclass(kind, msgspec.Struct):
        document = msgspec.json.schema(kind)
    else:
        document = kind.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def _fields(document: dict[str, Any]) -> str:
    top = document
    if "$ref" in document:
        top = document["$defs"][document["$ref"].rpartition("/")[2]]
    required = set(top.get("required", ()))
    rows = (
        (_code(key), _kind(value), "yes" if key in required else "")
        for key, value in top["properties"].items()
    )
    return table(["field", "type", "required"], rows)


def _kind(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "anyOf" in value:
        return " or ".join(_kind(each) for each in value["anyOf"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if value.get("type") == "array":
        return f"array of {_kind(value.get('items', {}))}"
    return str(value.get("type", "any"))


def commands() -> str:
    """Return the verbs, each with a link to its page."""
    rows = (
        (f"[kvbench {verb}](cli/{verb}.md)", _command(verb).get_short_help_str(200))
        for verb in VERBS
    )
    return table(["command", ""], rows)


def _command(verb: str) -> click.Command:
    command = kvbench.get_command(click.Context(kvbench), verb)
    assert command is not None, verb
    return command


def notebook() -> str:
    """Return the notebook's cells: text, code in fences, pictures it was saved with."""
    parts = []
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"^#", "##", source, flags=re.M))
            continue
        parts.append(f"```python\n{source}\n```")
        found = (output.get("data", {}).get("image/png") for output in cell["outputs"])
        pictures = ("".join(each.split()) for each in found if each)
        parts += [f"![What the cell draws](data:image/png;base64,{each})" for each in pictures]
    return "\n\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "common parameters": common_parameters,
    "methods": methods,
    "engines": engines,
    "engine matrix": engine_matrix,
    "tasks": tasks,
    "columns": columns,
    "schemas": schemas,
    "notebook": notebook,
}


def command_page(verb: str) -> str:
    """Return the page of a verb: what click says of it, and of its subcommands."""
    command = _command(verb)
    parts = _command_parts(f"# kvbench {verb}", f"kvbench {verb}", command)
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        parts += _command_parts(f"## {name}", f"kvbench {verb} {name}", sub)
    return "\n\n".join(parts) + "\n"


def _command_parts(title: str, path: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    rows = []
    for option in command.get_params(context):
        if isinstance(option, click.Option) and (record := option.get_help_record(context)):
            variable = option.envvar if isinstance(option.envvar, str) else ""
            shown = (
                record[1]
                .replace(f"[env var: {variable}]", "")
                .replace(f"env var: {variable}; ", "")
            )
            rows.append((_code(record[0]), shown, _code(variable)))
    text = inspect.cleandoc(command.help or "").replace("<", "&lt;")
    return [title, text, f"```text\n{usage}\n```", table(["option", "meaning", "variable"], rows)]


def root_page(file: str) -> str:
    """Return a page of the repository's root, its links led from there to `docs/`."""
    text = (ROOT / file).read_text("utf-8")
    for page, source in OF_THE_ROOT.items():
        text = text.replace(f"]({source})", f"]({page})")
    return text.replace("](docs/", "](")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page per command and per decision to the navigation."""
    verbs = [{f"kvbench {verb}": f"reference/cli/{verb}.md"} for verb in VERBS]
    _extend(config.nav or [], "reference/cli.md", verbs)
    pages = sorted((ROOT / "docs/decisions").glob("0*.md"))
    numbered = [{_numbered(page): f"decisions/{page.name}"} for page in pages]
    _extend(config.nav or [], "decisions/README.md", numbered)
    return config


def _numbered(page: Path) -> str:
    title = page.read_text("utf-8").splitlines()[0].removeprefix("# ")
    return f"{int(page.name[:4])}. {title.replace('`', '')}"


def _extend(nav: list[Any], page: str, more: list[Any]) -> None:
    """Make the entry of a page a section that begins with it."""
    for entry in nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            if value == page:
                entry[title] = [page, *more]
            elif isinstance(value, list):
                _extend(value, page, more)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and schemas that have no file."""
    made = {f"reference/cli/{verb}.md": command_page(verb) for verb in VERBS}
    made |= {page: root_page(file) for page, file in OF_THE_ROOT.items()}
    for name, (_, kind) in SCHEMAS.items():
        made[f"reference/schemas/{name}.json"] = json.dumps(schema(kind), indent=2) + "\n"
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what is generated where a page asks for it."""
    return re.sub(r"^<!-- generated: (.+) -->$", lambda m: GENERATED[m[1]](), markdown, flags=re.M)
