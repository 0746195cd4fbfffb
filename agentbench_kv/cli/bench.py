"""`kvbench bench`: the speed of kernels, of restored blocks and of servers, without any task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli.bench_roofline import roofline
from agentbench_kv.cli.bench_serving import serving
from agentbench_kv.cli.bench_trace import trace
from agentbench_kv.cli.options import NATURAL, POSITIVE, json_option, local, option, print_json

if TYPE_CHECKING:
    from agentbench_kv.engines.llamacpp.restore_bench import RestoreTimes
    from agentbench_kv.kernels.benchmark import KernelCase, KernelTimes
    from agentbench_kv.results.papers import PublishedFigure


OPERATIONS = (
    "compact", "attention_mass", "select_top", "ring_write", "rope_rotate", "aabb", "aabb_score",
    "similarity",
)  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")
_HEADER = (
    "operation", "model", "sessions", "T", "B", "native, us", "torch, us", "faster", "library, us",
    "MB to move", "of a copy", "rows moved",
)  # fmt: skip
_LONG = 8192  # tokens


@click.group()
def bench() -> None:
    """Time the parts that methods are made of, and servers under load."""


bench.add_command(serving)
bench.add_command(roofline)
bench.add_command(trace)


@bench.command()
@local("--op operations", "[all]", click.Choice(OPERATIONS), multiple=True)
@local("--model models", default=("qwen3-8b", "qwen3-32b"), show_default=False)
@local("--tokens", kind=POSITIVE, default=(2048, 8192, 32768), show_default=False)
@local("--budget budgets", kind=POSITIVE, default=(1024, 4096), show_default=False)
@local("--sessions", kind=POSITIVE, default=(1, 64), show_default=False)
@local("--block", "Tokens; 0: contiguous.", NATURAL, default=16, show_default=False)
@local("--dtype", kind=click.Choice(DTYPES), default="bfloat16", show_default=False)
@local("--device", kind=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=False)
@local("--repeats", kind=POSITIVE, default=9)
@local("--memory", "Largest cache in GiB.", POSITIVE, default=4, show_default=False)
@json_option
def kernels(as_json: bool, **options: Any) -> None:
    """Time every kernel against PyTorch's operations and a plain copy, one layer at a time.

    Operations that do not depend on the budget are measured once per T; caches above --memory are
    left out and named.
    """
    from agentbench_kv.kernels import active_backend
    from agentbench_kv.kernels.benchmark import measure
    from agentbench_kv.kernels.torch_backend import TorchBackend

    repeats = options.pop("repeats")
    cells, left_out = _cells(options)
    native = active_backend(cells[0].device if cells else "cpu")
    found: list[KernelTimes] = []
    if not as_json:
        click.echo(f"{native.name} kernels: {native.about}")
        click.echo(f"| {' | '.join(_HEADER)} |\n|{'---|' * 2}{'--:|' * (len(_HEADER) - 2)}")
    for each in measure(cells, native, TorchBackend(), repeats):
        found.append(each)
        if not as_json:
            click.echo(_kernel_row(each))
    if as_json:
        print_json({"backend": native.name, "about": native.about, "cells": _plain(found)})
    for line in left_out:
        click.echo(f"left out: {line}", err=True)


def _cells(options: dict[str, Any]) -> tuple[list[KernelCase], list[str]]:
    """Return what to measure, and what is left out with the reason."""
    import torch

    from agentbench_kv.errors import PrerequisiteError, unknown_name
    from agentbench_kv.kernels.benchmark import MODELS, KernelCase

    device, dtype = options["device"], getattr(torch, options["dtype"])
    if device == "cuda" and not torch.cuda.is_available():
        raise PrerequisiteError("--device cuda: PyTorch sees no GPU; see kvbench doctor")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(auto if device == "auto" else device)
    for model in options["models"]:
        if model not in MODELS:
            raise unknown_name("model shape", model, MODELS)
    cells: list[KernelCase] = []
    left_out: list[str] = []
    for operation in options["operations"] or OPERATIONS:
        quadratic = operation == "similarity" and where.type == "cpu"
        for model, count, length, budget in _grid(operation, options):
            size = options["block"] or length
            cell = KernelCase(operation, model, count, length, budget, size, dtype, where)
            name = f"{operation} {model}, {count} sessions, T={length}, B={budget}"
            if cell.cache_bytes > options["memory"] << 30:
                left_out.append(f"{name}: {cell.cache_bytes / 2**30:.0f} GiB of cache (--memory)")
            elif quadratic and (length > _LONG or count > 1):
                left_out.append(f"{name}: quadratic in T, slow on a CPU")
            else:
                cells.append(cell)
    return cells, left_out


def _grid(operation: str, options: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Yield (model, sessions, T, B); only the budgets below T, one where none matters."""
    matters = operation in ("compact", "select_top", "rope_rotate")
    for model, count, length in product(
        *(options[name] for name in ("models", "sessions", "tokens"))
    ):
        fitting = [budget for budget in options["budgets"] if budget < length]
        for budget in fitting if matters else fitting[:1]:
            yield model, count, length, budget


def _kernel_row(each: KernelTimes) -> str:
    cell = each.case
    library = "" if each.library_us is None else f"{each.library_us:,.0f}"
    cells = (
        cell.operation, cell.model, str(cell.sessions), f"{cell.tokens:,}", f"{cell.budget:,}",
        f"{each.native_us:,.0f}", f"{each.torch_us:,.0f}", f"{each.torch_us / each.native_us:.1f}x",
        library, f"{each.bytes_moved / 1e6:.2f}", f"{each.share_of_copy:.0%}",
        f"{each.rows_moved:,}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _plain(found: Sequence[KernelTimes]) -> list[dict[str, Any]]:
    rows = [asdict(each) for each in found]
    for row in rows:
        row |= row.pop("case")
        row |= {"dtype": str(row["dtype"]).removeprefix("torch."), "device": str(row["device"])}
    return rows


_BLOCKS = (20, 40, 160, 640, 1280)  # tokens
_MOST_TOKENS = 1792
_RESTORE_HEADER = (
    "protocol", "tokens", "save, ms", "evict, ms", "restore, ms", "re-prefill, ms", "faster",
    "save + restore", "load",
)  # fmt: skip
_PUBLISHED = ("block_save_ms", "block_restore_ms", "reprefill_ms", "restore_speedup")


@bench.command()
@option(
    "--model",
    "GGUF file.  [default: random weights, 8 layers of 512]",
    click.Path(exists=True, dir_okay=False, path_type=Path),
)
@local("--tokens", "Block.", click.IntRange(1, _MOST_TOKENS), default=_BLOCKS, show_default=False)
@local("--cells", kind=click.IntRange(4096), default=8192)
@local("--dtype", kind=click.Choice(["float32", "float16"]), default="float16")
@local("--repeats", kind=POSITIVE, default=5)
@json_option
def restore(
    model: Path | None, tokens: tuple[int, ...], cells: int, dtype: str, repeats: int, as_json: bool
) -> None:
    """Time saving, evicting and restoring a block on llama.cpp, and computing it again.

    One thread; processor time of that thread, so that a busy machine disturbs little.
    """
    from agentbench_kv.engines.llamacpp.restore_bench import RestoreTimes, measure_restore
    from agentbench_kv.environments import python_of

    about: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    for row in measure_restore(python_of("llamacpp"), model, dtype, tokens, cells, repeats):
        if isinstance(row, RestoreTimes):
            speedups = {"speedup": row.speedup, "both_speedup": row.both_speedup}
            found.append(asdict(row) | speedups)
            line = _restore_row(row)
        else:
            about, line = row, _restore_head(row)
        if not as_json:
            click.echo(line)
    if as_json:
        print_json({**about, "cells_measured": found})
    else:
        _print_published()


def _restore_head(about: dict[str, Any]) -> str:
    return (
        f"{about['model']}: {about['layers']} layers, {about['kv_heads']} KV heads of "
        f"{about['head_dim']}, {about['dtype']}, {about['bytes_per_token']:,} B per token, "
        f"{about['cells']:,} cells, {about['threads']} thread\n"
        f"| {' | '.join(_RESTORE_HEADER)} |\n|---|{'--:|' * (len(_RESTORE_HEADER) - 1)}"
    )


def _restore_row(row: RestoreTimes) -> str:
    times = (row.save, row.evict, row.restore, row.prefill)
    cells = (
        row.protocol, f"{row.tokens:,}", *(f"{time:.2f}" for time in times),
        f"{row.speedup:.0f}x", f"{row.both_speedup:.0f}x", f"{row.load_average:.1f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _print_published() -> None:
    """Print what was published, measured on other hardware, model and protocol."""
    from agentbench_kv.engines.llamacpp.restore_bench import PROTOCOLS

    for name, meaning in PROTOCOLS.items():
        click.echo(f"{name}: {meaning}")
    click.echo("\npublished (not comparable: another processor, model and llama.cpp):")
    click.echo("| source | tokens | save, ms | restore, ms | re-prefill, ms | faster |")
    click.echo(f"|---|{'--:|' * 5}")
    for block, figures in _published().items():
        first = figures[_PUBLISHED[0]]
        values = " | ".join(f"{figures[metric].value:g}" for metric in _PUBLISHED[:3])
        source = f"{first.source} {first.where}, {first.model}, {first.setting.get('gpu')}"
        click.echo(f"| {source} | {block} | {values} | {figures[_PUBLISHED[3]].value:g}x |")


def _published() -> dict[str, dict[str, PublishedFigure]]:
    """Return the published figures by block and metric."""
    from agentbench_kv.results.papers import figures

    blocks: dict[str, dict[str, PublishedFigure]] = {}
    for figure in figures("efficiency"):
        if figure.metric in _PUBLISHED:
            block = figure.setting["workload"].removesuffix("-token block")
            blocks.setdefault(block, {})[figure.metric] = figure
    return blocks
