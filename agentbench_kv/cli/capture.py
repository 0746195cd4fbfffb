"""`kvbench capture`: the queries, keys and values of one session, in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from agentbench_kv.cli.options import (
    FILE,
    json_option,
    local,
    option,
    parse_budget,
    parse_settings,
    set_option,
)
from agentbench_kv.cli.spec_options import base_spec, spec_options
from agentbench_kv.errors import UsageError


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

    from agentbench_kv.analysis.archives import check_suffix
    from agentbench_kv.cli.documents import print_json
    from agentbench_kv.engines.embedded.model import load_model
    from agentbench_kv.observe import capture_session, capture_size
    from agentbench_kv.spec import resolve

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
