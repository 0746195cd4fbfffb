"""Every operation once on awkward sizes, for a sanitizer to watch; `python sanitized_run.py cpu`.

Results are compared with PyTorch's, so that a run that reads the wrong rows fails as well.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch import Tensor

from agentbench_kv import kernels
from agentbench_kv.kernels import paged
from agentbench_kv.kernels.layout import PagedRows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GQA = ("mean_prob", "max_prob", "max_logit", "per_head")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def select_top() -> list[Tensor]:
    found = []
    for tokens, rows in ((1, 1), (33, 3), (1025, 2), (4097, 9)):
        scores = random(rows, tokens)
        scores[:, ::7] = torch.nan
        always = torch.zeros(rows, tokens, dtype=torch.bool)
        always[:, -1] = True
        for budget in {1, tokens // 2 + 1, tokens}:
            found += [move(kernels.select_top, scores, budget)]
            found += [move(kernels.select_top, scores, budget, always)]
            places = torch.rand(rows, tokens).argsort(-1) * 3
            found += [move(kernels.select_top, scores.nan_to_num(), budget, None, places)]
    return found


def ring_write() -> list[Tensor]:
    found = []
    for of, to in itertools.product(DTYPES, DTYPES):
        ring, rows = random(9, 3, 37, dtype=to), random(5, 3, 39, dtype=of)[..., 1:38]
        found.append(ring := ring.to(DEVICE))
        kernels.ring_write(ring, rows.to(DEVICE), torch.tensor([8, 0, 3, 1, 7]).to(DEVICE))
    return found


def attention() -> list[Tensor]:
    found = []
    for dtype, window in itertools.product(DTYPES, (None, 30)):
        for rows, dim, n in ((1, 1, 1), (67, 33, 5), (300, 80, 75), (300, 64, 1)):
            queries, keys = random(2, 6, n, dim, dtype=dtype), random(2, 2, rows, dim, dtype=dtype)
            values = (0.01 * random(2, 2, rows, dim)).to(dtype)
            seen = kernels.SeenRows(torch.tensor([rows, max(n, rows // 2)]), rows, n, window)
            found.append(kernels.attention(queries, keys, values, seen, 0.3))
            found.append(kernels.attention(queries, keys, values, seen, 0.3, random(6)))
    return found


def attention_mass() -> list[Tensor]:
    found = []
    for dtype, gqa in itertools.product(DTYPES, GQA):
        for tokens, dim, n in ((1, 1, 1), (67, 33, 5), (200, 80, 35)):
            queries, keys = random(6, n, dim, dtype=dtype), random(2, tokens, dim, dtype=dtype)
            found.append(move(kernels.attention_mass, queries, keys, gqa=gqa))
    return found


def cache(block: int, dim: int, dtype: torch.dtype) -> tuple[list[Tensor], list[PagedRows]]:
    """Layers allocated one by one, rows an odd number of values apart."""
    layers = [random(40, 2, block, 2 * dim + 1, dtype=dtype).to(DEVICE) for _ in range(2)]
    positions = torch.arange(2 * 40 * 2 * block).reshape(2, 40, 2, block).to(DEVICE)
    views = [
        PagedRows.of([each[..., :dim] for each in layers], "bhrd"),
        PagedRows.of([each[..., dim : 2 * dim] for each in layers], "bhrd"),
        PagedRows.of(positions, "lbhr"),
    ]
    return [*layers, positions], views


def blocks(lengths: list[int], block: int) -> tuple[Tensor, Tensor]:
    width = max(-(-length // block) for length in lengths)
    table = torch.randperm(40)[: len(lengths) * width].reshape(len(lengths), width)
    return table.int().to(DEVICE), torch.tensor(lengths).to(DEVICE)


def paged_operations() -> list[Tensor]:
    found = []
    for block, dim, dtype in ((1, 7, torch.float16), (16, 80, torch.bfloat16), (5, 32, DTYPES[0])):
        lengths = [13, 19] if block == 1 else [33, 80][:: 2 if block == 5 else 1]
        storage, (keys, values, positions) = cache(block, dim, dtype)
        table, used = blocks(lengths, block)
        longest = max(lengths)
        queries = random(len(lengths), 2, 6, 9, dim, dtype=dtype).to(DEVICE)
        valid = torch.rand(len(lengths), 9).to(DEVICE) < 0.7
        at = torch.randint(0, 3000, (len(lengths), 9)).to(DEVICE)
        for gqa in GQA:
            options = {"query_positions": at, "key_positions": positions, "valid": valid}
            found.append(
                paged.attention_mass(
                    queries, keys, table, used, longest=longest, gqa=gqa, **options
                )
            )
        shifts = torch.randint(-99, 99, (len(lengths), 2, 2, longest)).to(DEVICE)
        inverse = torch.rand(dim // 2).to(DEVICE)
        for interleaved in (False, True):
            paged.rope_rotate(keys, table, used, shifts, inverse, interleaved=interleaved)
        found += [*(each.clone() for each in storage)]
        found += compacted(storage, [keys, values, positions], table, used, lengths)
    return found


def compacted(
    storage: list[Tensor],
    tensors: list[PagedRows],
    table: Tensor,
    used: Tensor,
    lengths: list[int],
) -> list[Tensor]:
    counts = [length * 2 // 3 for length in lengths]
    for sort in (False, True):
        kept = torch.full((len(lengths), 2, 2, max(counts)), -1)
        for session, layer, head in itertools.product(range(len(lengths)), (0, 1), (0, 1)):
            chosen = torch.randperm(lengths[session])[: counts[session]].sort().values
            kept[session, layer, head, : counts[session]] = chosen
        number = torch.tensor(counts).to(DEVICE)
        paged.compact(tensors, table, kept.to(DEVICE), used, counts=number, sort=sort)
    return storage


def contiguous_compact() -> list[Tensor]:
    keys, values = (random(2, 3, 41, 5, dtype=torch.float16).to(DEVICE) for _ in range(2))
    positions = torch.arange(41).expand(2, 3, 41).clone().to(DEVICE)
    kept = torch.randperm(37)[:17].sort().values.expand(2, 3, 17).to(DEVICE)
    kernels.compact(keys, values, positions, kept, 37)
    return [keys, values, positions]


def boxes() -> list[Tensor]:
    found = []
    for dtype, (tokens, block, dim) in itertools.product(DTYPES, ((1, 16, 7), (67, 16, 33))):
        keys = random(2, tokens, dim + 1, dtype=dtype).to(DEVICE)[..., 1:]
        lows, highs = kernels.aabb(keys, block)
        scores = kernels.aabb_score(random(6, 5, dim, dtype=dtype).to(DEVICE), lows, highs)
        found += [lows, highs, scores]
    return found


def similarity() -> list[Tensor]:
    found = []
    for dtype, (tokens, dim) in itertools.product(DTYPES, ((1, 7), (67, 33), (130, 64))):
        # Far from every cosine, as which column is spared depends on the last bit otherwise.
        found += [move(kernels.similarity_column_mean, random(2, tokens, dim, dtype=dtype), 1.5)]
    return found


def move(operation, first: Tensor, *others, **options) -> Tensor:
    others = tuple(o.to(DEVICE) if isinstance(o, Tensor) else o for o in others)
    return operation(first.to(DEVICE), *others, **options)


OPERATIONS = (
    select_top,
    ring_write,
    attention,
    attention_mass,
    paged_operations,
    contiguous_compact,
    boxes,
    similarity,
)


def run(backend: str) -> list[Tensor]:
    kernels.use_backend(backend)
    torch.manual_seed(0)
    return [each for operation in OPERATIONS for each in operation()]


def main() -> None:
    results = run(BACKEND)
    for got, expected in zip(results, run("torch"), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-4, equal_nan=True)
    print(f"{len(results)} results on {BACKEND} are right")  # noqa: T201


BACKEND = sys.argv[1]
DEVICE = "cuda" if BACKEND == "cuda" else "cpu"

if __name__ == "__main__":
    main()
