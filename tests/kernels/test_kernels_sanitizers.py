"""Every operation under sanitizers, and inside captured CUDA graphs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentbench_kv import kernels
from agentbench_kv.kernels import paged
from agentbench_kv.kernels.layout import PagedRows

SCRIPT = Path(__file__).with_name("sanitized_run.py")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1"
OPTIONS = "detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=255:halt_on_error=1"
"""Fresh memory is filled with NaN as well, so that a read of what nobody wrote shows."""


@pytest.fixture(autouse=True)
def backend():
    """Backends are chosen by the tests themselves."""
    yield
    kernels.use_backend("auto")


def run_script(backend, before=(), **environment):
    done = subprocess.run(
        [*before, sys.executable, str(SCRIPT), backend],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert f"results on {backend} are right" in done.stdout
    return done.stdout + done.stderr


@pytest.fixture
def sanitizer():
    """The run-time library that has to be loaded before Python is."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("g++ has no libasan")
    return found


@pytest.mark.slow
def test_address_and_undefined_behaviour_sanitizers_report_nothing(sanitizer, tmp_path):
    said = run_script(
        "cpu",
        CXX="g++",
        KVBENCH_KERNEL_FLAGS=FLAGS,
        KVBENCH_KERNEL_CACHE=str(tmp_path / "cache"),
        LD_PRELOAD=sanitizer,
        ASAN_OPTIONS=OPTIONS,
        UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1",
    )
    assert "runtime error" not in said
    assert "AddressSanitizer" not in said
    (library,) = (tmp_path / "cache").iterdir()
    assert b"__asan_report_load" in library.read_bytes()
    assert b"__ubsan_handle" in library.read_bytes()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_reports_nothing(tool):
    command = shutil.which("compute-sanitizer") or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )
    if command is None:
        pytest.skip("no compute-sanitizer on this machine")
    said = run_script("cuda", before=(command, "--tool", tool, "--error-exitcode", "9"))
    assert "ERROR SUMMARY: 0 errors" in said or "RACECHECK SUMMARY: 0 hazards" in said


# ---- captured graphs ----


def draw_select():
    return [torch.randn(6, 3000, device="cuda")]


def select(scores):
    return [kernels.select_top(scores, 500)]


def draw_ring():
    """Eight rows, of which those that nobody wants go to the last slot."""
    slots = torch.randperm(30, device="cuda")[:8]
    slots[torch.rand(8, device="cuda") < 0.5] = 30
    ring = torch.zeros(31, 2, 64, dtype=torch.bfloat16, device="cuda")
    return [ring, torch.randn(8, 2, 64, device="cuda"), slots]


def ring(ring, rows, slots):
    kernels.ring_write(ring, rows, slots)
    return [ring[:30]]


def draw_compact():
    blocks = torch.randperm(80, device="cuda").reshape(2, 40).int()
    keys = torch.randn(2, 80, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.randint(1, 641, (2,), device="cuda")
    counts = (lengths * 2 // 3).clamp(min=1)
    return [keys, blocks, some_rows(lengths, counts), lengths, counts]


def some_rows(lengths, counts):
    """Rows [2, 2, 2, 640] to keep: a random choice of each session's, and nonsense behind it."""
    index = torch.arange(640, device=lengths.device)
    score = torch.rand(2, 2, 2, 640, device=lengths.device)
    score = score.masked_fill(index >= lengths[:, None, None, None], -1)
    rank = score.argsort(-1, descending=True).argsort(-1)
    chosen = rank < counts[:, None, None, None]
    return torch.where(chosen, index, 639).sort(-1).values


def compact(keys, blocks, kept, lengths, counts):
    rows = PagedRows.of(keys, "lbhrd")
    moved = paged.compact([rows], blocks, kept, lengths, counts=counts, check=False)
    return [keys, moved]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operation", "draw"),
    [(select, draw_select), (ring, draw_ring), (compact, draw_compact)],
)
def test_a_captured_graph_replays_on_new_data(operation, draw):
    """Replays give what a call gives, bit for bit, of data that came after the capture."""
    kernels.use_backend("cuda")
    torch.manual_seed(0)
    static = draw()
    operation(*(each.clone() for each in static))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = operation(*static)
    for _ in range(3):
        fresh = draw()
        for held, new in zip(static, fresh, strict=True):
            held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected = operation(*fresh)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
