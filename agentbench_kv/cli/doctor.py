"""`kvbench doctor`: what works on this machine, and the command that mends what does not."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from agentbench_kv import __version__
from agentbench_kv.cli.options import flag, local, print_json, tool_syntax_option
from agentbench_kv.errors import KVBenchError

if TYPE_CHECKING:
    from agentbench_kv.run.inspection import ModelReport

Verdict = Literal["ok", "optional", "broken"]
_CORE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pandas", "httpx")
_REINSTALL = "pip install --upgrade agentbench-kv"
_MORE_SPACE = "free some space, or: export KVBENCH_HOME=/elsewhere"
_LEAST_FREE_MB = 2000
_DATA = {
    "locomo10.json": "docs/locomo.md",
    "frames_test_set.csv": "docs/browser.md",
    "browsecomp_plus_decrypted.jsonl": "docs/browser.md",
    "tau2_v0.2.0": "docs/tau2.md",
    "tau2_v1.0.1": "docs/tau2.md",
}
_CANNED_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z\u00fcrich"}}\n</tool_call>'
)


@dataclass(frozen=True)
class Diagnosis:
    """One thing looked at."""

    name: str
    verdict: Verdict  # optional: absent, and needed for some runs only
    found: str
    mend: str | None = None  # the command that mends it


@click.command()
@local("--model", "Look at this model folder or GGUF file instead; nothing is loaded.")
@tool_syntax_option
@flag("--json as_json", "Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, model: str | None, tool_syntax: str, as_json: bool) -> None:
    """Look at versions, GPU, engines, environments, model, tool parser and disk.

    With --model: which engines run it, its chat template and tool syntax, a session with the phase
    of every part, its stop tokens and limits. Exit code 2 if something is broken; what is merely
    absent does not count.
    """
    if model is not None:
        _show_model(model, tool_syntax, as_json)
        return
    findings = diagnose()
    if as_json:
        click.echo(json.dumps([asdict(each) for each in findings], indent=1))
    else:
        click.echo("\n".join(_line(each) for each in findings))
    if any(each.verdict == "broken" for each in findings):
        ctx.exit(2)


def _show_model(model: str, tool_syntax: str, as_json: bool) -> None:
    from rich.text import Text

    from agentbench_kv.results.terminal import console, visible
    from agentbench_kv.results.transcripts import PHASE_STYLES
    from agentbench_kv.run.inspection import inspect

    report = inspect(model, tool_syntax)
    if as_json:
        print_json(asdict(report))
        return
    screen = console()
    for name, found in _about_model(report):
        screen.print(f"{name:<16}{visible(found)}", markup=False, soft_wrap=True)
    if report.session:
        legend = (Text(name, style=style) for name, style in PHASE_STYLES.items())
        screen.print(Text("\nphases of a session: ").append_text(Text(", ").join(legend)))
    for phase, text in report.session:
        tag = f"  {phase:<6} | "
        shown = "\n".join(tag + line for line in visible(text, "\n").splitlines())
        screen.print(Text(shown, style=PHASE_STYLES[phase]), soft_wrap=True)


def _about_model(report: ModelReport) -> Iterator[tuple[str, str]]:
    yield "model", report.model
    yield "architecture", report.architecture
    yield from ((f"on {name}", found) for name, found in report.engines.items())
    limit = "unknown" if report.context_limit is None else f"{report.context_limit:,} tokens"
    yield "context", f"{limit}; {report.longer_context}" if report.longer_context else limit
    yield "stop tokens", ", ".join(f"{text} ({id})" for id, text in report.stop_tokens.items())
    yield "chat template", report.template or "none"
    signs = "; ".join(f"{sign} in {where}" for sign, where in report.signs.items())
    yield "tool syntax", f"{report.tool_syntax} ({signs})" if signs else report.tool_syntax
    yield "phase family", report.phase_family
    yield from report.checks.items()
    yield from (("refused", each) for each in report.refused)


def diagnose() -> list[Diagnosis]:
    """Look at everything; one examination that fails never hides the others."""
    return [finding for examine in EXAMINATIONS for finding in _guarded(examine)]


def _guarded(examine: Callable[[], Iterator[Diagnosis]]) -> list[Diagnosis]:
    name = examine.__name__.strip("_").replace("_", " ")
    try:
        return list(examine())
    except Exception as error:  # noqa: BLE001  a broken installation can fail in any way
        return [Diagnosis(name, "broken", f"{type(error).__name__}: {error}", _REINSTALL)]


def _versions() -> Iterator[Diagnosis]:
    python = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Diagnosis(
        "kvbench",
        "broken" if old else "ok",
        f"{__version__} on Python {python}, {platform.system()} {platform.machine()}",
        "install Python 3.11 or newer" if old else None,
    )
    for package in _CORE:
        try:
            yield Diagnosis(package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Diagnosis(package, "broken", "not installed", _REINSTALL)


def _accelerator() -> Iterator[Diagnosis]:
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        mend = "on a machine with an NVIDIA GPU: pip install torch (CUDA build); see nvidia-smi"
        yield Diagnosis("gpu", "optional", f"none visible to torch ({built})", mend)
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        yield Diagnosis(f"gpu {index}", "ok", found)


def _kernels() -> Iterator[Diagnosis]:
    import torch

    from agentbench_kv.kernels import active_backend

    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        try:
            backend = active_backend(device)
        except KVBenchError as error:
            yield Diagnosis(f"kernels on {device}", "broken", str(error), "unset KVBENCH_KERNELS")
            continue
        # PyTorch in a library's place works, only slower, and says itself what is missing.
        wanted = backend.name == device or backend.about == "PyTorch operations"
        mend = None if wanted else "install g++ (or nvcc), then: kvbench doctor"
        found = f"{backend.name}: {backend.about}"
        yield Diagnosis(f"kernels on {device}", "ok" if wanted else "optional", found, mend)


def _engines() -> Iterator[Diagnosis]:
    points = sorted(metadata.entry_points(group="agentbench_kv.engines"), key=lambda p: p.name)
    if not points:
        yield Diagnosis("engines", "broken", "none registered", _REINSTALL)
    for point in points:
        try:
            point.load()
            yield Diagnosis(f"engine {point.name}", "ok", point.value)
        except Exception as error:  # noqa: BLE001  a plug-in can fail in any way
            found = f"does not import: {error}"
            yield Diagnosis(f"engine {point.name}", "broken", found, _REINSTALL)


def _environments() -> Iterator[Diagnosis]:
    from agentbench_kv import environments

    for each in environments.list_environments():
        ready = each.state == "ready"
        found = f"{each.state}: {each.detail}"
        yield Diagnosis(f"env {each.name}", "ok" if ready else "optional", found, each.mend)


def _data() -> Iterator[Diagnosis]:
    from agentbench_kv.adapters.data import VARIABLE, data_folder

    folder = data_folder()
    for name, page in _DATA.items():
        mend = f"put it there or set {VARIABLE}; see {page}"
        found = str(folder / name) if (folder / name).exists() else ""
        yield _optional(f"data {name}", found, f"not in {folder}", mend)
    corpora = sorted(path.name for path in (folder / "corpora").glob("*") if path.is_dir())
    mend = "kvbench data import-corpus --help"
    yield _optional("corpora", ", ".join(corpora), f"none in {folder}", mend)


def _needed(name: str, works: bool, found: str) -> Diagnosis:
    return Diagnosis(name, "ok", found) if works else Diagnosis(name, "broken", found, _REINSTALL)


def _optional(name: str, found: str, absent: str, mend: str) -> Diagnosis:
    return Diagnosis(name, "ok", found) if found else Diagnosis(name, "optional", absent, mend)


def _micro_model() -> Iterator[Diagnosis]:
    folder = resources.files("agentbench_kv.models") / "micro"
    weights = sorted(f.name for f in folder.iterdir() if f.name.endswith(".safetensors"))
    found = f"{folder} ({', '.join(weights)})" if weights else f"no weights in {folder}"
    yield _needed("micro model", bool(weights), found)


def _tool_parser() -> Iterator[Diagnosis]:
    from agentbench_kv.gateway.parsing import OutputParser
    from agentbench_kv.phases.syntax import SYNTAXES

    parser = OutputParser(SYNTAXES["hermes"], lambda: "call_0")
    deltas = [*parser.feed(_CANNED_CALL), *parser.finish()]
    calls = [delta.call["function"] for delta in deltas if delta.call is not None]
    read = [json.loads(call["arguments"]) for call in calls] == [{"city": "Z\u00fcrich"}]
    became = f"parses: {calls[0]['name']}" if read else f"became {calls!r}"
    yield _needed("tool parser", read, f"a canned call {became}")


def _disk() -> Iterator[Diagnosis]:
    from agentbench_kv import environments

    for name, folder in (("disk here", Path.cwd()), ("disk of KVBENCH_HOME", environments.home())):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free >> 20
        writable = os.access(there, os.W_OK)
        absent = f"{free} MB free at {there}" + ("" if writable else ", not writable")
        found = absent if writable and free >= _LEAST_FREE_MB else ""
        yield _optional(name, found, absent, _MORE_SPACE)


EXAMINATIONS: tuple[Callable[[], Iterator[Diagnosis]], ...] = (
    _versions, _accelerator, _kernels, _engines, _environments, _data, _micro_model, _tool_parser,
    _disk,
)  # fmt: skip


def _line(each: Diagnosis) -> str:
    mark = {"ok": "ok", "optional": "absent", "broken": "BROKEN"}[each.verdict]
    mend = f"\n{'':10}mend: {each.mend}" if each.mend else ""
    return f"{mark:<8}  {each.name}: {each.found}{mend}"
