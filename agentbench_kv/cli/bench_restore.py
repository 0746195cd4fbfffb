"""`kvbench bench restore`: a block comes back from the host, against computing it again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli.documents import print_json
from agentbench_kv.cli.options import POSITIVE, json_option, local, option

if TYPE_CHECKING:
    from agentbench_kv.engines.llamacpp.restore_bench import RestoreTimes
    from agentbench_kv.results.papers import PublishedFigure

SIZES = (20, 40, 160, 640, 1280)
MOST_TOKENS = 1792
HEADER = (
    "protocol", "tokens", "save, ms", "evict, ms", "restore, ms", "re-prefill, ms", "faster",
    "save + restore", "load",
)  # fmt: skip
PUBLISHED = ("block_save_ms", "block_restore_ms", "reprefill_ms", "restore_speedup")


@click.command()
@option(
    "--model",
    "GGUF file.  [default: random weights, 8 layers of 512]",
    click.Path(exists=True, dir_okay=False, path_type=Path),
)
@local("--tokens", "Block.", click.IntRange(1, MOST_TOKENS), default=SIZES, show_default=False)
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

    rows = measure_restore(python_of("llamacpp"), model, dtype, tokens, cells, repeats)
    about: dict[str, Any] = {}
    found: list[RestoreTimes] = []
    for row in rows:
        if isinstance(row, RestoreTimes):
            found.append(row)
        else:
            about = row
        if not as_json:
            click.echo(_line(row) if isinstance(row, RestoreTimes) else _head(row))
    if as_json:
        print_json({**about, "cells_measured": [_plain(row) for row in found]})
    else:
        _print_published()


def _head(about: dict[str, Any]) -> str:
    return (
        f"{about['model']}: {about['layers']} layers, {about['kv_heads']} KV heads of "
        f"{about['head_dim']}, {about['dtype']}, {about['bytes_per_token']:,} B per token, "
        f"{about['cells']:,} cells, {about['threads']} thread\n"
        f"| {' | '.join(HEADER)} |\n|---|{'--:|' * (len(HEADER) - 1)}"
    )


def _line(row: RestoreTimes) -> str:
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
        first = figures[PUBLISHED[0]]
        values = " | ".join(f"{figures[metric].value:g}" for metric in PUBLISHED[:3])
        source = f"{first.source} {first.where}, {first.model}, {first.setting.get('gpu')}"
        click.echo(f"| {source} | {block} | {values} | {figures[PUBLISHED[3]].value:g}x |")


def _published() -> dict[str, dict[str, PublishedFigure]]:
    """Return the published figures by block and metric."""
    from agentbench_kv.results.papers import figures

    blocks: dict[str, dict[str, PublishedFigure]] = {}
    for figure in figures("efficiency"):
        if figure.metric in PUBLISHED:
            block = figure.setting["workload"].removesuffix("-token block")
            blocks.setdefault(block, {})[figure.metric] = figure
    return blocks


def _plain(row: RestoreTimes) -> dict[str, Any]:
    return {**asdict(row), "speedup": row.speedup, "both_speedup": row.both_speedup}
