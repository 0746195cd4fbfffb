"""The CUDA library's device code, run on the CPU by `emulation/cuda_emulation.h`.

Every operation runs under several orders of the threads of a block: what lacks a barrier differs.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels_layouts import KEYS, Size, bits, make_cache, make_table, places
from kernels_reference import (
    COSINE_ATOL,
    SUM_RTOL,
    clear_threshold,
    doubles,
    similarity_column_mean,
    to_dtype,
)
from kernels_reference import aabb as reference_aabb
from kernels_reference import aabb_score as reference_aabb_score
from kernels_reference import select_top as reference_select
from test_kernels_attention_mass_paged import normal
from test_kernels_compact_paged import Work
from test_kernels_ring_write import awkward, exact
from test_kernels_rope import close as close_rope
from test_kernels_rope import expanded, fill_keys, frequencies
from test_kernels_select_top import KINDS, draw_positions
from test_kernels_select_top import draw as draw_scores
from test_kernels_similarity import draw as draw_keys

from agentbench_kv import kernels
from agentbench_kv.errors import KVBenchError
from agentbench_kv.kernels import dispatch, paged
from agentbench_kv.kernels.build import SOURCES
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.kernels.native import NativeBackend

EMULATION = Path(__file__).parent / "emulation"
FLAGS = ["-std=c++17", "-O1", "-g1", "-march=native", "-fPIC", "-shared", "-pthread"]
FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DKVB_EMULATED_CUDA"]
UNDEFINED = ["-fsanitize=undefined", "-static-libubsan", "-DKVB_EMULATION_SANITIZED"]
ORDER = "KVB_EMULATION_ORDER"
ORDERS = ["ascending", "descending", "11"]
SHARED_BYTES = 48 << 10
GUARD = 1 << 16
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GQA = ["mean_prob", "max_prob", "max_logit", "per_head"]


def compiled(source, folder, flags):
    """Build a source with the emulator in place of CUDA."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the emulated kernels are built by g++ on Linux, which this machine lacks")
    output = folder / f"{source.stem}-emulated.so"
    where = [f"-I{SOURCES}", f"-I{EMULATION}"]
    command = [compiler, *FLAGS, *flags, *where, "-x", "c++", str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return output


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return compiled(SOURCES / "kvbench.cu", tmp_path_factory.mktemp("emulated"), UNDEFINED)


@pytest.fixture(scope="session")
def emulated(library):
    return NativeBackend("emulated", library)


@pytest.fixture(autouse=True)
def backend(emulated, monkeypatch):
    """Tensors lie in CPU memory, and the device code computes on them."""
    monkeypatch.setitem(dispatch._loaded, "cpu", emulated)
    monkeypatch.setattr(dispatch, "_chosen", ["cpu"])
    return "cpu"


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Memory that nobody has written to holds NaN, or -1, and lies between guards."""
    unwritten = torch.empty
    rooms = []

    def guarded(*args, **kwargs):
        tensor = unwritten(*args, **kwargs)
        if tensor.nbytes == 0:
            return tensor
        room = unwritten(tensor.nbytes + 2 * GUARD, dtype=torch.uint8).fill_(0x5A)
        inside = room[GUARD:-GUARD].fill_(0xFF)
        rooms.append(room)
        return inside.view(tensor.dtype).reshape(tensor.shape)

    monkeypatch.setattr(torch, "empty", guarded)
    yield
    for room in rooms:
        assert (room[:GUARD] == 0x5A).all(), "something was written before a result"
        assert (room[-GUARD:] == 0x5A).all(), "something was written past a result"


@pytest.fixture
def in_every_order(monkeypatch):
    """Call a function once per order of the threads; bits of what it returns must not differ."""

    def run(function):
        first = None
        for order in ORDERS:
            monkeypatch.setenv(ORDER, order)
            found = function()
            raw = [bits(each) for each in (found if isinstance(found, list | tuple) else [found])]
            first = first or raw
            for one, other in zip(first, raw, strict=True):
                assert torch.equal(one, other), f"results differ in order {order}"
        return found

    return run


# ---- compaction ----


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize(
    ("layout", "block", "dim", "dtype"),
    [
        ("vllm", 16, 64, torch.float16),
        ("sglang", 1, 80, torch.bfloat16),
        ("loose", 3, 7, torch.uint8),  # odd bytes at odd addresses
        ("loose", 3, 32, torch.float16),  # rows whose addresses allow words of different widths
        ("llamacpp", 16, 3, torch.float16),
        ("stacked", 3, 1024, torch.float16),  # 2,048 bytes: fewer than 32 rows are staged
        ("split", 16, 1, torch.int8),
    ],
)
def test_compact_of_sessions(layout, block, dim, dtype, sort, in_every_order):
    """Up to a group of 32 sorted rows, and past it; positions are rows of 8 bytes."""
    size = Size(blocks=210 // block + 5, block=block, dim=dim, dtype=dtype)
    lengths, counts = [70, 1, 64, 50], [50, 1, 33, 0]
    in_every_order(lambda: Work(layout, size, lengths, counts).check(sort))


@pytest.mark.parametrize("sort", [False, True])
def test_compact_of_more_rows_than_a_launch_has_warps(sort, in_every_order):
    size = Size(layers=1, heads=1, blocks=100, dim=4)
    in_every_order(lambda: Work("vllm", size, [1300, 90], [600, 90]).check(sort))


@pytest.mark.parametrize("sort", [False, True])
def test_compact_of_a_contiguous_cache(sort, in_every_order):
    rng = np.random.default_rng(0)
    kept = np.sort(np.stack([rng.permutation(61)[:35] for _ in range(6)])).reshape(2, 3, 35)
    rows = torch.from_numpy(kept)

    def run():
        start = torch.arange(2 * 3 * 71, dtype=torch.int64).reshape(2, 3, 71)
        positions = start.clone()
        keys = start[..., None].expand(-1, -1, -1, 5).half()
        moved = kernels.compact(keys, keys.clone(), positions, rows, 61, sort=sort)
        late = kept >= 35 if not sort else kept != np.arange(35)
        assert moved == late.sum()
        assert torch.equal(keys[..., 4], positions.half())
        wanted = start.gather(2, rows)
        found = positions[..., :35]
        assert torch.equal(found if sort else found.sort(-1).values, wanted)
        assert torch.equal(positions[..., 61:], start[..., 61:])
        return [keys, positions]

    in_every_order(run)


def test_compact_of_rows_without_bytes_moves_nothing():
    empty = PagedRows((torch.zeros(1, 1, 9, 0),))
    kept = torch.tensor([[[[3, 5]]]])
    table = torch.zeros(1, 1, dtype=torch.int32)
    assert paged.compact([empty], table, kept, torch.tensor([9]), sort=True) == 2


def test_compact_refuses_sorted_rows_that_no_shared_memory_holds():
    cache = torch.zeros(1, 1, 4, 12_289)
    kept = torch.tensor([[[1, 2]]])
    with pytest.raises(KVBenchError, match="kvb_compact on cpu failed: invalid argument"):
        kernels.compact(cache, cache.clone(), torch.zeros(1, 1, 4).long(), kept, 4, sort=True)


# ---- selection ----


@pytest.mark.parametrize("tokens", [1, 31, 1024, 1025, 5000])
def test_select_top_of_every_kind(tokens, in_every_order):
    """Ties, NaN, infinities, both zeros, and scores that differ in all bits or in the last."""
    scores = np.concatenate([draw_scores(kind, 1, tokens) for kind in KINDS])
    given = torch.from_numpy(scores)
    budgets = {1, tokens // 3, tokens} if tokens < 1000 else {tokens // 3}
    for budget in budgets:
        got = in_every_order(lambda budget=budget: kernels.select_top(given, budget))
        assert np.array_equal(got.numpy(), reference_select(scores, budget))


@pytest.mark.parametrize("tokens", [33, 1025, 2050])
def test_select_top_takes_what_is_marked(tokens, in_every_order):
    rng = np.random.default_rng(tokens)
    scores = np.concatenate([draw_scores(kind, 1, tokens) for kind in ("ties", "special")])
    budget = tokens // 3
    always = np.zeros(scores.shape, bool)
    always[0, rng.permutation(tokens)[: budget // 2]] = True
    always[1, rng.permutation(tokens)[:budget]] = True
    marks = torch.from_numpy(always)
    got = in_every_order(lambda: kernels.select_top(torch.from_numpy(scores), budget, marks))
    assert np.array_equal(got.numpy(), reference_select(scores, budget, always))


@pytest.mark.parametrize("tokens", [2, 1024, 2050])
def test_select_top_breaks_ties_by_position(tokens, in_every_order):
    scores = np.concatenate([draw_scores(kind, 1, tokens) for kind in KINDS])
    positions = draw_positions(len(KINDS), tokens, 3 * tokens)
    given, places, budget = torch.from_numpy(scores), torch.from_numpy(positions), tokens // 2
    got = in_every_order(lambda: kernels.select_top(given, budget, None, places))
    assert np.array_equal(got.numpy(), reference_select(scores, budget, None, positions))


@pytest.mark.parametrize("tokens", [64, 2050])
def test_select_top_stays_within_its_row_where_positions_are_twice(tokens, in_every_order):
    # Against the rules, so any of the equal ones may come; nothing is written past the row's end.
    scores, positions = torch.zeros(3, tokens), torch.zeros(3, tokens, dtype=torch.int64)
    got = in_every_order(lambda: kernels.select_top(scores, 5, None, positions))
    assert got.tolist() == [[0, 1, 2, 3, 4]] * 3


# ---- ring ----


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("of", DTYPES)
def test_ring_write_casts(of, to, in_every_order):
    rows = torch.from_numpy(awkward()).to(of)[::3]

    def run():
        ring = torch.full(rows.shape, torch.nan, dtype=to)
        kernels.ring_write(ring, rows, torch.arange(len(rows)).flip(0))
        return ring

    exact(in_every_order(run).flip(0), to_dtype(doubles(rows), to))


def test_ring_write_of_views_touches_its_slots_only(in_every_order):
    rng = np.random.default_rng(0)
    start = normal(rng, (20, 5, 137), torch.float16, "cpu")
    rows = normal(rng, (20, 5, 190), torch.float32, "cpu")[::2, 1:4, 3:136]
    slots = torch.from_numpy(rng.permutation(18)[:10])

    def run():
        ring = start.clone()
        kernels.ring_write(ring[1:19, 2:5, 1:134], rows, slots)
        return ring

    expected = start.clone()
    expected[1:19, 2:5, 1:134][slots] = rows.half()
    assert torch.equal(in_every_order(run), expected)


# ---- rotation ----


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "pairs"), [(2, 1), (80, 33), (128, 64)])
def test_rope_of_a_contiguous_cache(dim, pairs, dtype, interleaved, in_every_order):
    rng = np.random.default_rng(dim)
    before = normal(rng, (2, 2, 11, dim), dtype, "cpu")
    shifts = rng.integers(-5000, 5000, (2, 2, 11))
    shifts[0, 0, :5] = [0, 7, 7, 0, 7]

    def run():
        keys = before.clone()
        turned = torch.from_numpy(shifts), frequencies(pairs)
        kernels.rope_rotate(keys, *turned, interleaved=interleaved)
        return keys

    keys = in_every_order(run)
    close_rope(keys, before, shifts, frequencies(pairs), interleaved)
    assert torch.equal(bits(keys[..., 2 * pairs :]), bits(before[..., 2 * pairs :]))


@pytest.mark.parametrize(("layout", "block"), [("sglang", 1), ("loose", 3), ("vllm", 16)])
def test_rope_of_sessions(layout, block, in_every_order):
    """More rows than a launch has warps, and a session with none."""
    lengths = [520, 0, 17]
    size = Size(layers=1, blocks=560 // block + 3, block=block, dim=6, dtype=torch.bfloat16)
    rng = np.random.default_rng(block)
    cache, table = make_cache(layout, size, rng), make_table(rng, lengths, size)
    before = fill_keys(cache, table, lengths, size)
    start = [each.clone() for each in cache.storage]
    shifts = np.broadcast_to(rng.integers(-3000, 3000, (3, 1, 1, 520)), (3, 1, 2, 520))
    arguments = torch.from_numpy(table), torch.tensor(lengths), expanded(shifts, "cpu")

    def run():
        for each, old in zip(cache.storage, start, strict=True):
            each.copy_(old)
        paged.rope_rotate(cache.keys, *arguments, frequencies(3))
        return [each.clone() for each in cache.storage]

    in_every_order(run)
    for (session, layer, head), old in before.items():
        where = places(table, session, range(lengths[session]), size)
        got = cache.read(cache.storage, KEYS, layer, head, *where)
        close_rope(got, old, shifts[session, layer, head, : len(old)], frequencies(3))
        cache.write(cache.storage, KEYS, layer, head, *where, old)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(start, cache.storage, strict=True))


# ---- boxes ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "block", "dim"), [(1, 128, 7), (17, 1, 32), (33, 16, 130), (150, 64, 80)]
)
def test_boxes_and_their_scores(tokens, block, dim, dtype, in_every_order):
    rng = np.random.default_rng(tokens)
    keys = normal(rng, (2, tokens, dim + 3), dtype, "cpu")[..., 1 : dim + 1]
    lows, highs = in_every_order(lambda: kernels.aabb(keys, block))
    low, high = reference_aabb(doubles(keys), block)
    assert np.array_equal(doubles(lows), low)
    assert np.array_equal(doubles(highs), high)
    queries = normal(rng, (6, 5, dim), dtype, "cpu")
    scores = in_every_order(lambda: kernels.aabb_score(queries, lows, highs))
    expected, scale = reference_aabb_score(doubles(queries), low, high)
    assert (np.abs(doubles(scores) - expected) <= SUM_RTOL * scale).all()


# ---- similarity ----


@pytest.mark.parametrize("share", [0.1, 0.97, "none above", "all above"])
@pytest.mark.parametrize(
    ("tokens", "dim", "dtype"),
    [(2, 7, torch.float32), (65, 33, torch.float16), (130, 80, torch.bfloat16)],
)
def test_similarity(tokens, dim, dtype, share, in_every_order):
    keys = draw_keys((2, tokens, dim + 1), dtype, "cpu")[..., 1:]
    fixed = {"none above": 1.5, "all above": -1.5}
    threshold = fixed[share] if share in fixed else clear_threshold(doubles(keys), share)
    got = in_every_order(lambda: kernels.similarity_column_mean(keys, threshold))
    expected = similarity_column_mean(doubles(keys), threshold)
    np.testing.assert_allclose(doubles(got), expected, rtol=0, atol=COSINE_ATOL)


@pytest.mark.parametrize("tokens", [1, 64, 97])
def test_similarity_spares_the_last_of_equal_keys(tokens, in_every_order):
    keys = draw_keys((1, tokens, 16), torch.float32, "cpu")
    keys[:, 1::3] = keys[:, :1]
    got = in_every_order(lambda: kernels.similarity_column_mean(keys, 0.99))
    expected = similarity_column_mean(doubles(keys), 0.99)
    np.testing.assert_allclose(doubles(got), expected, rtol=0, atol=COSINE_ATOL)


# ---- memory ----


def test_static_shared_memory_of_every_kernel_fits(library):
    """CUDA gives a block 48 KB; only a kernel without any asks for dynamic memory as well."""
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine to list shared variables")
    said = subprocess.run(["nm", "-S", "-C", library], check=True, capture_output=True, text=True)
    used = {}
    pattern = r"^\S+ (\S+) [bd] kvb::(\w+)\(.*\)::\w+$"
    for size, kernel in re.findall(pattern, said.stdout, re.MULTILINE):
        used[kernel] = used.get(kernel, 0) + int(size, 16)
    assert {"select_rows", "similarity_rows"} == set(used)
    assert max(used.values()) <= SHARED_BYTES


@pytest.mark.slow
def test_address_sanitizer_reports_nothing(tmp_path):
    """No read or write outside of any tensor, on the sizes of `sanitized_run`."""
    output = compiled(SOURCES / "kvbench.cu", tmp_path, ["-fsanitize=address"])
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("g++ has no libasan")
    code = (
        "import sys, sanitized_run\n"
        "from agentbench_kv.kernels import dispatch, native\n"
        "dispatch._load = lambda kind: native.NativeBackend(kind, sys.argv[2])\n"
        "sanitized_run.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "cpu", str(output)],
        env={
            **os.environ,
            "LD_PRELOAD": found,
            "OMP_NUM_THREADS": "1",
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:detect_stack_use_after_return=0",
            ORDER: "5",
        },
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "results on cpu are right" in done.stdout


# ---- the emulator ----


@pytest.fixture(scope="session")
def broken(tmp_path_factory):
    """Run a kernel of `broken_kernels.cpp`: what it says, and what it has written."""
    folder = tmp_path_factory.mktemp("broken")
    loaded = ctypes.CDLL(str(compiled(EMULATION / "broken_kernels.cpp", folder, UNDEFINED)))

    def run(kernel):
        out = torch.zeros(128)
        function = getattr(loaded, f"run_{kernel}")
        function.restype = ctypes.c_char_p
        return function(ctypes.c_void_p(out.data_ptr())).decode(), out

    return run


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (
            "shuffle_in_a_branch",
            r"waits at __shfl_xor_sync \(.*, step 1\), but lane 1 waits at __sy",
        ),
        ("shuffle_after_an_exit", r"waits at __shfl_xor_sync .* but lane 5 has exited"),
        ("shuffle_outside_of_the_mask", "outside of the mask"),
        ("two_barriers", r"wait at __syncthreads \(.*:\d+\) and at __syncthreads"),
        ("beside_dynamic_memory", "writes 240 bytes into dynamic shared memory of 240 bytes"),
        ("too_many_threads", "no such grid or block"),
        ("too_many_rows_of_blocks", "no such grid or block"),
        ("no_blocks", "no such grid or block"),
        ("too_much_memory", "more than 48 KB"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_the_emulator_names_an_error(kernel, said, order, broken, monkeypatch):
    monkeypatch.setenv(ORDER, order)
    heard, _ = broken(kernel)
    assert heard.startswith(f"{kernel}: ")
    assert re.search(said, heard), heard


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("beside_a_row", r"ndex 8 out of bounds for type 'float \[8\]'"),
        ("misaligned_words", "misaligned address"),
    ],
)
def test_the_sanitizer_names_an_error(kernel, said, broken, capfd):
    """Once for every line, which is why no order is chosen."""
    heard, _ = broken(kernel)
    capfd.readouterr()  # the same, printed
    assert heard.startswith(f"{kernel}: ")
    assert re.search(said, heard), heard


@pytest.mark.parametrize("kernel", ["a_race", "a_race_after_a_shuffle"])
def test_a_race_differs_between_orders(kernel, broken, monkeypatch):
    results = []
    for order in ORDERS:
        monkeypatch.setenv(ORDER, order)
        heard, out = broken(kernel)
        assert heard == "no error"
        results.append(bits(out))
    assert not torch.equal(results[0], results[1])


def test_no_block_finds_what_another_left(broken):
    _, out = broken("left_by_another_block")
    assert torch.equal(out[:64], torch.ones(64))
    assert out[64:].isnan().all()


@pytest.mark.parametrize("order", ORDERS)
def test_a_sound_kernel_computes(order, broken, monkeypatch):
    monkeypatch.setenv(ORDER, order)
    heard, out = broken("sound")
    assert heard == "no error"
    assert torch.equal(out[:40], torch.full((40,), sum(range(64)) + 8.0))
    assert not out[40:].any()
