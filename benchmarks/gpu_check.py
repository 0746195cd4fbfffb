"""What anyone with a GPU runs first: is all of it right there, and how fast? 8 minutes at most.

    python benchmarks/gpu_check.py [--out gpu-check] [--engine vllm] [--minutes 8]

First correctness: every kernel against PyTorch's operations, what CUDA graphs capture, and an
engine, token by token (`kvbench selftest engine`): the first serving engine that is installed, the
embedded one if none is, or those that `--engine` names, with 8 minutes each. Then a table of
throughput, of random weights in Qwen3-8B's shapes where the engine takes them. Nothing is sent
anywhere; the last lines say which files to send back. Exit 0 if correctness was checked and nothing
failed; 1 if a check failed, or one of correctness was not finished; 2 without a GPU or an engine
that was named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.engines.core.rings import QueryBuffer, QueryStore, RingWrite, RowShape
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.vllm.plugin.capture import QueryCapture
from agentbench_kv.environments import python_of
from agentbench_kv.errors import KVBenchError
from agentbench_kv.kernels import active_backend, dispatch
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.kernels.torch_backend import TorchBackend
from agentbench_kv.methods.base import Phase, QueryKind, QueryPlan
from agentbench_kv.run.provenance import hardware
from agentbench_kv.serving_bench.measurements import serving_folders

NO_GPU = "no GPU: PyTorch sees no CUDA device, so nothing was checked (kvbench doctor says more)"
MINUTES = 8.0  # for each engine
# Engine -> its environment; the first that is installed is checked if none is named.
ENGINES = {"vllm": "vllm-cuda", "sglang": "sglang", "embedded": ""}
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 1e-4  # scores are sums in float32, whatever the rows are; in bfloat16: above 1e-3
POOL_BYTES = 14_000_000_000  # 95,000 tokens of Qwen3-8B's: not all of the sessions' at once
# Of the GPU, for one server with Qwen3-8B's weights and that pool, and for two.
ONE_SERVER, TWO_SERVERS = 38_000_000_000, 76_000_000_000
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "layer_types": ["full_attention"] * 36, "torch_dtype": "bfloat16", "dtype": "bfloat16",
}  # fmt: skip


@dataclass
class Outcome:
    """What became of one stage."""

    name: str
    passed: bool | None  # None: it was not run, or had nothing to judge
    seconds: float = 0.0
    said: list[str] = field(default_factory=list)  # its lines, failures first
    needed: bool = False  # whether nothing is known to be right without it


@dataclass(frozen=True)
class Stage:
    """One thing to do; `limit_s` is the most it may take of what time is left."""

    name: str
    limit_s: float
    run: Callable[[float], Outcome]
    needed: bool = False  # whether it is about what is right


# ---- kernels ----


def kernel_checks(device: str, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield each operation with how far the compiled one is from PyTorch's.

    The largest difference over the largest value; 0 where it has to be exact. Scores are compared
    with those in float32 on the CPU: on a GPU, PyTorch computes them in either backend.
    """
    compiled, reference = active_backend(device), TorchBackend()
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    def apart(found: Tensor, expected: Tensor) -> float:
        exact = expected.double().cpu()
        return float((found.double().cpu() - exact).abs().max() / exact.abs().max())

    def plain(rows: Tensor) -> Tensor:
        return rows.float().cpu()

    queries, keys = normal(8, 32, 64), normal(2, 3000, 64)
    for gqa in ("mean_prob", "max_prob", "max_logit", "per_head"):
        found = compiled.attention_mass(queries, keys, gqa, None, None)
        expected = reference.attention_mass(plain(queries), plain(keys), gqa, None, None)
        yield f"attention_mass {gqa}", apart(found, expected)
    for rows_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        low = keys.to(rows_dtype)  # which stand for what they are in float32
        found = compiled.attention_mass(queries, low, "mean_prob", None, None)
        expected = reference.attention_mass(plain(queries), plain(low), "mean_prob", None, None)
        name = str(rows_dtype).removeprefix("torch.")
        yield f"attention_mass of {name}", apart(found, expected)
    scores = torch.randn(6, 5000, generator=g).to(device)
    scores[:, ::7] = 1.5  # more rows than are left of 700 after those above
    places = torch.stack([torch.randperm(5000, generator=g) for _ in range(6)]).to(device)
    for positions in (None, places):
        both = [b.select_top(scores, 700, None, positions) for b in (compiled, reference)]
        yield f"select_top{'' if positions is None else ' by position'}", apart(*both)
    yield "select_top of positions twice", _top_apart(compiled, reference, scores, places // 2)
    yield "compact, paged", _compact_apart(compiled, reference, device, dtype, g)
    yield "rope_rotate, paged", _rope_apart(compiled, reference, device, dtype, g)
    rings = [torch.zeros(40, 8, 64, device=device, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(40, generator=g)[:16].to(device)
    rows = normal(16, 8, 64)
    for backend, ring in zip((compiled, reference), rings, strict=True):
        backend.ring_write(ring, rows, slots)
    yield "ring_write", apart(*rings)
    found = compiled.similarity_column_mean(keys[:, :900], 0.5)
    expected = reference.similarity_column_mean(plain(keys[:, :900]), 0.5)
    yield "similarity_column_mean", apart(found, expected)
    boxes = [b.aabb(keys, 5) for b in (compiled, reference)]
    yield "aabb", max(apart(*pair) for pair in zip(*boxes, strict=True))
    found = compiled.aabb_score(queries, *boxes[1])
    expected = reference.aabb_score(plain(queries), *map(plain, boxes[1]))
    yield "aabb_score", apart(found, expected)


def _top_apart(compiled: Any, reference: Any, scores: Tensor, positions: Tensor) -> float:
    """Return 0 if rows are chosen once, and none below the last that PyTorch chooses.

    Where a position is there twice, only so much is promised.
    """
    scores = scores.clone()
    scores[::2] = 1.5  # all of a row tie, so that one of two equal rows is left out
    lowest = []
    for backend in (compiled, reference):
        chosen = backend.select_top(scores, 701, None, positions).cpu()
        for row in chosen.tolist():
            if len(row) != 701 or sorted({*row}) != row or not 0 <= row[0] <= row[-1] < 5000:
                return float("inf")
        found = (each.cpu().gather(-1, chosen).tolist() for each in (scores, -positions))
        lowest.append([min(zip(*pair, strict=True)) for pair in zip(*found, strict=True)])
    return 0.0 if lowest[0] == lowest[1] else float("inf")


def _paged(device: str, dtype: torch.dtype, g: torch.Generator) -> tuple[PagedRows, Tensor]:
    """Return a cache of 3 layers in 40 blocks of 16, and the tables of two sessions."""
    layers = [torch.randn(40, 16, 2, 64, generator=g).to(device, dtype) for _ in range(3)]
    table = torch.randperm(40, generator=g).reshape(2, 20).int().to(device)
    return PagedRows.of(layers, "brhd"), table


def _copied(rows: PagedRows) -> PagedRows:
    return PagedRows(tuple(layer.permute(1, 2, 0, 3).clone().permute(2, 0, 1, 3)
                           for layer in rows.layers))  # fmt: skip


def _beyond_rounding(one: Tensor, other: Tensor) -> float:
    """Return the largest difference beyond one step of the dtype: a sum may round either way."""
    step = torch.finfo(one.dtype).eps * torch.maximum(one.abs(), other.abs()).double()
    return float(((one.double() - other.double()).abs() - step).clamp(min=0).max())


def _compact_apart(
    compiled: Any, reference: Any, device: str, dtype: torch.dtype, g: torch.Generator
) -> float:
    keys, table = _paged(device, dtype, g)
    values, _ = _paged(device, dtype, g)
    kept = torch.stack(
        [torch.randperm(300, generator=g)[:120].sort().values for _ in range(2 * 3 * 2)]
    )
    kept = kept.reshape(2, 3, 2, 120).to(device)
    worst = 0.0
    for sort in (False, True):
        copies = [(_copied(keys), _copied(values)) for _ in range(2)]
        moved = [
            int(backend.compact_paged(copy, table, kept, None, sort))
            for backend, copy in zip((compiled, reference), copies, strict=True)
        ]
        held = [_held_rows(copy, table, kept.shape[-1]) for copy in copies]
        worst = max(worst, abs(moved[0] - moved[1]), 0.0 if held[0] == held[1] else float("inf"))
    return worst


def _held_rows(
    caches: Sequence[PagedRows], table: Tensor, size: int
) -> list[list[tuple[float, ...]]]:
    """Return what the first rows hold, whole and keys beside values, of a session, layer and head.

    Sorted: which hole a row goes to is each backend's own.
    """
    index = torch.arange(size, device=table.device)
    found = []
    for session, layers in product(table, zip(*(cache.layers for cache in caches), strict=True)):
        places = session[index // 16].long(), index % 16
        rows = torch.cat([layer[:, *places].double() for layer in layers], -1)
        found += [sorted(map(tuple, head)) for head in rows.tolist()]
    return found


def _rope_apart(
    compiled: Any, reference: Any, device: str, dtype: torch.dtype, g: torch.Generator
) -> float:
    rows, table = _paged(device, dtype, g)
    shifts = torch.randint(-9000, 9000, (2, 3, 2, 300), generator=g).to(device)
    lengths = torch.tensor([300, 250], device=device)
    frequencies = (1e-4 ** (torch.arange(32) / 32)).to(device)
    copies = [_copied(rows) for _ in range(2)]
    for backend, copy in zip((compiled, reference), copies, strict=True):
        backend.rope_rotate(copy, table, lengths, shifts, frequencies, False)
    pairs = zip(*(copy.layers for copy in copies), strict=True)
    return max(_beyond_rounding(*pair) for pair in pairs)


def check_kernels(device: str, _: float = 0.0) -> Outcome:
    outcome = Outcome("kernels against PyTorch", True, said=[])
    compiled = active_backend(device)
    outcome.said.append(f"{compiled.name}: {compiled.about}")
    if compiled.name == "torch":
        return Outcome(outcome.name, False, said=["there are none: " + outcome.said[0]])
    for dtype in DTYPES:
        for name, apart in kernel_checks(device, dtype):
            line = f"{str(dtype).removeprefix('torch.')} {name}: {apart:.1e}"
            if not apart <= TOLERANCE:
                outcome.passed = False
                outcome.said.insert(0, f"FAILED {line}, expected at most {TOLERANCE:.0e}")
            else:
                outcome.said.append(line)
    return outcome


# ---- CUDA graphs ----


def check_graphs(_: float = 0.0) -> Outcome:
    """Capture what engines capture: queries into static buffers, rings written from them."""
    device = torch.device("cuda")
    shape = RowShape(2, 8, 2, 64, torch.bfloat16, device)
    rings = QueryBuffer(QueryPlan(QueryKind.RECENT, 4), shape)
    rings.reserve(2)
    capture = QueryCapture()
    capture.connect({"a": 0, "b": 1}, rings)
    capture.allocate(8, 2, (8, 64), torch.empty(0, dtype=shape.dtype, device=device))
    queries = torch.zeros(8, 8, 64, dtype=shape.dtype, device=device)
    slots = torch.tensor([5, 2, 7], device=device)
    ring = torch.zeros(16, 8, 64, dtype=shape.dtype, device=device)

    def step() -> None:
        for name in ("a", "b"):
            capture.see(name, queries)
        active_backend("cuda").ring_write(ring, queries[:3], slots)

    graph = captured(step)
    said = []
    for value in (1.0, 2.0):
        queries.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        if not all(bool((buffer == value).all()) for buffer in capture._buffers):
            said.append(f"FAILED static buffers do not hold the queries of replay {value:g}")
        if not bool((ring[slots] == value).all()) or bool((ring[0] != 0).any()):
            said.append(f"FAILED ring_write in a graph, replay {value:g}")
    said += rings_put_aside("cuda")
    return Outcome("CUDA graphs", not said, said=said or ["buffers and rings follow replays"])


def rings_put_aside(device: str) -> list[str]:
    """Return what is wrong with the rings of three sessions where two have room on the device."""
    shape = RowShape(2, 8, 2, 64, torch.bfloat16, torch.device(device))
    rings = QueryBuffer(QueryPlan(QueryKind.RECENT, 4), shape)
    rings.reserve(2)
    stores = [QueryStore(rings) for _ in range(3)]
    for number, store in enumerate(stores):
        with rings.planning():
            rows, slots = store.place([Phase.ACT] * 4, 0, 0)
        write = RingWrite(*(torch.tensor(each, device=device) for each in (rows, slots)))
        for layer in range(shape.layers):
            queries = torch.full((8, 4, 64), number + 1.0, dtype=shape.dtype, device=device)
            rings.write(layer, queries, write)
    wrong = [
        f"FAILED rings of session {number} are others after their way to the host and back"
        for number, store in enumerate(stores)
        if not all(bool((q.vectors == number + 1).all()) for q in store.layer_queries(2))
    ]
    return wrong + ["FAILED rings took more than was reserved"] * (rings.places != 2)


def captured(step: Callable[[], None]) -> Any:
    """Capture a step, after it ran on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


# ---- commands ----


def command(name: str, words: Sequence[str], log: Path, limit_s: float) -> Outcome:
    """Run one of our commands; its output goes to a file, its last lines into the outcome."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from agentbench_kv.cli import main; main()", *words],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # an engine ends its own server
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            return Outcome(name, None, said=[f"not finished in {limit_s:.0f} s; see {log}"])
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-40:] + ([] if code == 0 else [f"exit {code}: {log}"])
    return Outcome(name, code == 0, said=said)


def roofline_share(name: str, words: Sequence[str], log: Path, limit_s: float) -> Outcome:
    """Hold a load test against the limit, if one was measured; its folder is the last word."""
    if not any(any(each.glob("rep*.json")) for each in serving_folders([Path(words[-1])])):
        return Outcome(name, None, said=["there is no throughput to hold against it"])
    return command(name, words, log, limit_s)


def installed() -> list[str]:
    """Return the engines that can run here."""
    found = []
    for engine, environment in ENGINES.items():
        try:
            if environment:
                python_of(environment)
        except KVBenchError:
            continue
        found.append(engine)
    return found


def shapes_folder(target: Path) -> Path:
    """Make a model folder of Qwen3-8B's shapes without weights; words are the micro model's."""
    micro = model_path("micro")
    target.mkdir(parents=True, exist_ok=True)
    for file in micro.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, target / file.name)
    config = json.loads((micro / "config.json").read_text()) | QWEN3_8B
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def throughput_words(engine: str, out: Path, shapes: Path, memory: int) -> list[str]:
    """Return the command of an engine's row: Qwen3-8B's shapes, or the micro model on embedded.

    `memory` are the bytes of the GPU.
    """
    words = ["bench", "serving", "--engine", engine, "--device", "cuda"]
    words += ["--turns", "2", "--sessions", "16", "--out", str(out / f"load-{engine}")]
    if engine == "embedded":
        words += ["--repeats", "1", "--warmup", "1", "--concurrency", "8"]
        return [*words, "--budget", "256", "--shape", "1k/64"]
    words += ["--model", str(shapes), "--load-format", "dummy", "--dtype", "bfloat16"]
    words += ["--budget", "1024", "--concurrency", "16"]
    if engine == "vllm":
        # Where there is room, two servers start at once and stay: both have weights and this pool.
        both = memory >= TWO_SERVERS
        share = 0.3 if both else 0.9
        for limit in (f"gpu-memory-utilization={share}", f"kv-cache-memory-bytes={POOL_BYTES}"):
            words += ["--engine-arg", limit]
        words += [*["--together"] * both, "--alone", "--method", "full", "--method", "agentkv"]
        words += ["--set", "trigger=prefill+every", "--repeats", "3" if both else "1"]
        return [*words, "--warmup", "0", "--shape", "8k/128"]
    return [*words, "--repeats", "1", "--warmup", "1", "--shape", "4k/128"]


def too_small(name: str, memory: int, _: float) -> Outcome:
    said = f"the GPU has {memory / 1e9:.0f} GB, and Qwen3-8B's shapes take {ONE_SERVER / 1e9:.0f}"
    return Outcome(name, None, said=[said])


def stages(engines: Sequence[str], out: Path, memory: int = TWO_SERVERS) -> list[Stage]:
    """Return all there is to do, in order: what is right first, then how fast."""
    found = [
        Stage("kernels against PyTorch", 90, partial(check_kernels, "cuda"), needed=True),
        Stage("CUDA graphs", 20, check_graphs, needed=True),
    ]
    for engine in engines:
        name = f"{engine}: selftest"
        words = ["selftest", "engine", engine, "--quick", "--method", "agentkv"]
        words += ["--family", "qwen3", "--device", "cuda"]
        log = out / f"selftest-{engine}.log"
        # vLLM took 77 s to start on an H200 with nothing compiled, and starts a few times here.
        found.append(Stage(name, 300, partial(command, name, words, log), needed=True))
    words = ["bench", "kernels", "--device", "cuda", "--repeats", "3", "--tokens", "8192",
             "--sessions", "64", "--budget", "4096", "--model", "qwen3-8b"]  # fmt: skip
    name = "kernels: share of a copy"
    found.append(Stage(name, 60, partial(command, name, words, out / "kernels.log")))
    shapes = shapes_folder(out / "qwen3-8b-shapes")
    for engine in engines:
        name = f"{engine}: throughput"
        if engine != "embedded" and memory < ONE_SERVER:
            found.append(Stage(name, 1, partial(too_small, name, memory)))
            continue
        words, log = throughput_words(engine, out, shapes, memory), out / f"load-{engine}.log"
        # SGLang has three arms in turn.
        found.append(Stage(name, 300, partial(command, name, words, log)))
        model = "micro" if engine == "embedded" else str(shapes)
        words = ["bench", "roofline", "--hardware", "measured", "--model", model]
        words += ["--run", str(out / f"load-{engine}")]
        name = f"{engine}: share of the roofline"
        log = out / f"roofline-{engine}.log"
        found.append(Stage(name, 30, partial(roofline_share, name, words, log)))
    return found


def play(todo: Sequence[Stage], seconds: float, say: Callable[[str], None]) -> list[Outcome]:
    """Run stages one after the other, within so many seconds; what fails stops none of them."""
    end, done = time.monotonic() + seconds, list[Outcome]()
    for stage in todo:
        left = end - time.monotonic()
        began = time.monotonic()
        if left < 5:
            outcome = Outcome(stage.name, None, said=["not run: the time is over (--minutes)"])
        else:
            try:
                outcome = stage.run(min(stage.limit_s, left))
            except Exception as error:  # noqa: BLE001  the next stages may still tell something
                outcome = Outcome(stage.name, False, said=[f"{type(error).__name__}: {error}"])
        outcome.seconds, outcome.needed = time.monotonic() - began, stage.needed
        done.append(outcome)
        verdict = {True: "ok", False: "FAILED", None: "--"}[outcome.passed]
        say(f"[{verdict}] {stage.name} ({outcome.seconds:.0f} s)")
        for line in outcome.said:
            say(f"    {line}")
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check"))
    parser.add_argument("--engine", action="append", default=[], choices=list(ENGINES))
    parser.add_argument("--minutes", type=float, help=f"in all; {MINUTES:g} for each engine")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    there = installed()
    engines = [name for name in ENGINES if name in given.engine] or there[:1]
    if missing := [name for name in engines if name not in there]:
        print(f"{missing[0]} is not installed: kvbench env create {ENGINES[missing[0]]}",
              file=sys.stderr)  # fmt: skip
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    dispatch.use_backend("auto")
    about = hardware()
    print(json.dumps(about))
    print(chosen(engines, there))
    minutes = given.minutes or MINUTES * len(engines)
    memory = torch.cuda.get_device_properties(0).total_memory
    done = play(stages(engines, given.out, memory), minutes * 60, print)
    return conclude(done, about, given.out)


def chosen(engines: Sequence[str], there: Sequence[str]) -> str:
    """Say which engines are checked, which are not, and how to name those."""
    out = [name for name in there if name not in engines]
    named = f" (to check them: {' '.join(f'--engine {name}' for name in out)})" if out else ""
    gone = [name for name in ENGINES if name not in there]
    return (f"engines: {', '.join(engines)}; left out: {', '.join(out) or 'none'}{named}; "
            f"not installed: {', '.join(gone) or 'none'}")  # fmt: skip


def conclude(done: Sequence[Outcome], about: dict[str, Any], out: Path) -> int:
    """Write everything down, say what to send back; 1 if not all is known to be right."""
    report = {"hardware": about, "torch": torch.__version__, "cuda": torch.version.cuda,
              "stages": [asdict(each) for each in done]}  # fmt: skip
    (out / "gpu-check.json").write_text(json.dumps(report, indent=2))
    failed = [each.name for each in done if each.passed is False]
    open_ = [each.name for each in done if each.passed is None and each.needed]
    unknown = [each.name for each in done if each.passed is None and not each.needed]
    print(f"\n{sum(each.passed is True for each in done)} of {len(done)} passed"
          f"{'; FAILED: ' + ', '.join(failed) if failed else ''}"
          f"{'; NOT CHECKED: ' + ', '.join(open_) if open_ else ''}"
          f"{'; not judged: ' + ', '.join(unknown) if unknown else ''}")  # fmt: skip
    print(f"send back: {out / 'gpu-check.json'} and {out}/*.log, with the figures of {out}/load-*")
    return 1 if failed or open_ else 0


if __name__ == "__main__":
    sys.exit(main())
