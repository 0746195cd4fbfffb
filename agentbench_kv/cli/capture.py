"""`kvbench capture`, `select`, `calibrate`: a session in a file, and what methods make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agentbench_kv.cli import options as opt
from agentbench_kv.errors import PrerequisiteError, UsageError


@click.command()
@opt.local("--out", kind=opt.FILE, required=True)
@opt.option("--task", default="micro/recall-1k")
@opt.local("--sample", "Id of a sample, or its number.", default="0")
@opt.option("--seed", default=0)
@opt.local("--method", "Method the session runs under.", default="full")
@opt.local("--budget", "If the method takes one.")
@opt.set_option("Method parameter.", envvar=None)
@opt.local("--layers N,N,...", "Layers to keep; all if not given.", default="")
@opt.local("--heads N,N,...", "KV heads to keep; all if not given.", default="")
@opt.local(
    "--precision", "Of the stored vectors.", click.Choice(["float16", "float32"]), default="float16"
)
@opt.json_option
@opt.spec_options
def capture(
    shared: dict[str, Any],
    pairs: tuple[str, ...],
    sample: str,
    layers: str,
    heads: str,
    precision: str,
    out: Path,
    as_json: bool,
    **base: Any,
) -> None:
    """Play one session of TASK and write Q, K, V, phases and token ids to OUT (.npz, .safetensors).

    The size per 1,000 tokens is stated before it starts. See kvbench select and kvbench analyze.
    """
    import torch

    from agentbench_kv.analysis.captures import check_suffix
    from agentbench_kv.engines.embedded.model import load_model
    from agentbench_kv.run.observe import capture_session, capture_size
    from agentbench_kv.run.spec import resolve

    check_suffix(out)
    spec = resolve(opt.base_spec(shared, **base), opt.parse_settings(pairs))
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
        opt.print_json(found)
        return
    click.echo(f"{made.length} tokens, {found['bytes'] / 1e6:.1f} MB: {out}")


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{option} {text!r}: expected numbers such as 0,2,3") from None


@click.command()
@opt.shown("--method", "Method, or method@preset. See kvbench ls methods.", required=True)
@opt.shown("--budget TOKENS", "Tokens kept per (layer, KV head), e.g. 64, 3k or 25%.")
@opt.shown(
    "--capture", "Capture file, .npz or .safetensors (docs/analysis.md).", opt.PATH, required=True
)
@opt.shown(
    "--out",
    "File to write, .npz or .safetensors: kept, score and meta.",
    opt.PATH,
    required=True,
    envvar="KVBENCH_SELECT_OUT",
)
@opt.set_option("Method parameter; repeatable. See kvbench ls methods.")
@opt.option(
    "--now POSITION",
    "Event before this position; later tokens are the future. [default: the capture's]",
    int,
)
@opt.flag("--json as_json", "Print meta as JSON.")
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
    chosen = make_method(method, budget, opt.parse_settings(pairs))
    session = Capture.load(capture)
    outcome = select_capture(session if now is None else session.at(now), chosen)
    outcome.save(out)
    if as_json:
        opt.print_json({**outcome.meta, "out": str(out)})
        return
    click.echo(
        f"{chosen.label} keeps {outcome.meta['budget']} of {outcome.meta['candidates']} tokens in "
        f"each of {session.layers} x {outcome.kept.shape[-2]} (layer, head)s: {out}"
    )


@click.command()
@opt.option("--model", "Name or folder.", default="micro")
@opt.local("--text", "Plain text, UTF-8, for every run of the model.", opt.FILE)
@opt.local("--task", "A micro task, for its own runs: on sessions that are none of its samples.")
@opt.dtype_option
@opt.device_option
@opt.json_option
def calibrate(
    model: str, text: Path | None, task: str | None, dtype: str, device: str, as_json: bool
) -> None:
    """Measure MODEL's queries on a text and keep the result for runs of triattention.

    Say which: --text or --task. A run's id depends on its calibration.
    """
    from agentbench_kv.engines.embedded.model import load_model
    from agentbench_kv.registry import load_task
    from agentbench_kv.run.calibration import (
        calibrate_on_task,
        calibration_path,
        make_calibration,
    )

    if (text is None) == (task is None):
        raise UsageError("say what to calibrate on: --text FILE, or --task micro/recall-5k")
    if task is not None:
        load_task(task)
        made = calibrate_on_task(model, task, dtype, device)
        path = calibration_path(model, task, dtype)
    elif text is not None:
        path = calibration_path(model)
        content = _read_text(text)
        made = make_calibration(load_model(model, dtype, device), [content], text.name, path)
    # What runs name: of methods without need of covariances, and of the others.
    hashes = {"sha256": made.without_covariance().sha256, "sha256_covariance": made.sha256}
    found = {"path": str(path), **hashes, **made.meta}
    if as_json:
        opt.print_json(found)
        return
    click.echo(
        f"calibrated {model} on {made.meta['tokens']} tokens of {made.meta['source']}: {path}"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrerequisiteError(f"cannot read {path} as UTF-8 text: {error}") from None
