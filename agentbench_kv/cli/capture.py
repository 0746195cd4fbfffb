"""`kvbench capture`, `select`, `calibrate`: a session in a file, and what methods make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from agentbench_kv.cli.options import (
    FILE,
    PATH,
    base_spec,
    device_option,
    dtype_option,
    flag,
    json_option,
    local,
    option,
    parse_budget,
    parse_settings,
    print_json,
    set_option,
    shown,
    spec_options,
)
from agentbench_kv.errors import PrerequisiteError, UsageError


@click.command()
@local("--out", kind=FILE, required=True)
@option("--task", default="micro/recall-1k")
@local("--sample", "Id of a sample, or its number.", default="0")
@option("--seed", default=0)
@local("--method", "Method the session runs under.", default="full")
@local("--budget", "If the method takes one.")
@set_option("Method parameter.", envvar=None)
@local("--layers N,N,...", "Layers to keep; all if not given.", default="")
@local("--heads N,N,...", "KV heads to keep; all if not given.", default="")
@local(
    "--precision", "Of the stored vectors.", click.Choice(["float16", "float32"]), default="float16"
)
@json_option
@spec_options
def capture(
    out: Path,
    task: str,
    sample: str,
    seed: int,
    method: str,
    budget: str | None,
    pairs: tuple[str, ...],
    layers: str,
    heads: str,
    precision: str,
    as_json: bool,
    shared: dict[str, Any],
) -> None:
    """Play one session of TASK and write Q, K, V, phases and token ids to OUT (.npz, .safetensors).

    The size per 1,000 tokens is stated before it starts. See kvbench select and kvbench analyze.
    """
    import torch

    from agentbench_kv.analysis.captures import check_suffix
    from agentbench_kv.engines.embedded.model import load_model
    from agentbench_kv.run.replay import capture_session, capture_size
    from agentbench_kv.run.spec import resolve

    check_suffix(out)
    named = replace(
        base_spec(shared), method=method, budget=parse_budget(budget), task=task, seed=seed
    )
    spec = resolve(named, parse_settings(pairs))
    model = load_model(spec.model, spec.dtype, spec.device)
    which, kv = _numbers("--layers", layers), _numbers("--heads", heads)
    bits = 16 if precision == "float16" else 32
    rows = (len(which) or model.shape.layers, len(kv) or model.shape.kv_heads)
    per_thousand = capture_size(model, *rows, 1000, bits) / 1e6
    click.echo(f"{per_thousand:.1f} MB per 1,000 tokens", err=True)
    made = capture_session(spec, sample, which, kv, getattr(torch, precision))
    made.save(out)
    found = {"path": str(out), "tokens": made.length, "bytes": out.stat().st_size, **made.meta}
    if as_json:
        print_json(found)
        return
    click.echo(f"{made.length} tokens, {found['bytes'] / 1e6:.1f} MB: {out}")


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{option} {text!r}: expected numbers such as 0,2,3") from None


@click.command()
@shown("--method", "Method, or method@preset. See kvbench ls methods.", required=True)
@shown("--budget TOKENS", "Tokens kept per (layer, KV head), e.g. 64, 3k or 25%.")
@shown("--capture", "Capture file, .npz or .safetensors (docs/analysis.md).", PATH, required=True)
@shown(
    "--out",
    "File to write, .npz or .safetensors: kept, score and meta.",
    PATH,
    required=True,
    envvar="KVBENCH_SELECT_OUT",
)
@set_option("Method parameter; repeatable. See kvbench ls methods.")
@option(
    "--now POSITION",
    "Event before this position; later tokens are the future. [default: the capture's]",
    int,
)
@flag("--json as_json", "Print meta as JSON.")
def select(
    method: str,
    budget: str | None,
    capture: Path,
    out: Path,
    pairs: tuple[str, ...],
    now: int | None,
    as_json: bool,
) -> None:
    """Score the tokens of a capture with METHOD and write which ones it keeps.

    Exactly the code the engines run, on a file.
    """
    from agentbench_kv.analysis.captures import Capture, check_suffix
    from agentbench_kv.analysis.replay import select_capture
    from agentbench_kv.registry import make_method

    check_suffix(out)
    if out.resolve() == capture.resolve():
        raise UsageError(f"--out {out} is the capture itself; give another file")
    chosen = make_method(method, budget, parse_settings(pairs))
    session = Capture.load(capture)
    outcome = select_capture(session if now is None else session.at(now), chosen)
    outcome.save(out)
    if as_json:
        print_json({**outcome.meta, "out": str(out)})
        return
    click.echo(
        f"{chosen.label} keeps {outcome.meta['budget']} of {outcome.meta['candidates']} tokens in "
        f"each of {session.layers} x {outcome.kept.shape[-2]} (layer, head)s: {out}"
    )


@click.command()
@option("--model", "Name or folder.", default="micro")
@option("--text", "Plain text, UTF-8; the micro task's text if not given.", FILE, envvar=None)
@dtype_option
@device_option
@json_option
def calibrate(model: str, text: Path | None, dtype: str, device: str, as_json: bool) -> None:
    """Measure MODEL's queries on TEXT and keep the result for every run of triattention."""
    from agentbench_kv.engines.embedded.model import load_model
    from agentbench_kv.methods.calibration import Calibration
    from agentbench_kv.run.calibration import MICRO_SOURCE, make_calibration, micro_texts

    texts = micro_texts() if text is None else [_read(text)]
    source = MICRO_SOURCE if text is None else text.name
    path = make_calibration(load_model(model, dtype, device), texts, source)
    meta = Calibration.load(path).meta
    if as_json:
        print_json({"path": str(path), **meta})
        return
    click.echo(f"calibrated {model} on {meta['tokens']} tokens of {source}: {path}")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrerequisiteError(f"cannot read {path} as UTF-8 text: {error}") from None
