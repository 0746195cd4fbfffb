"""Damaged files and absurd command lines: a documented exit code and few lines, no traceback.

The command runs in this process, so that an exception is one here; warnings are exceptions too.
`nightly` plays the same at a size that takes hours.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import click
import numpy as np
import pytest
from safetensors.numpy import save_file

from agentbench_kv import registry
from agentbench_kv.cli import kvbench as kvbench_group
from agentbench_kv.conformance.engines.fixture import write_model
from agentbench_kv.engines.embedded import model as embedded_model
from agentbench_kv.errors import PrerequisiteError

CODES = {0, 1, 2, 3, 4}
MOST_LINES = 3
LONGEST_S = 120  # a call that hangs is ended, and fails

Damage = Callable[[Random, bytes], bytes]
Call = Callable[..., Any]


def sizes(small: int, large: int) -> Any:
    """How many calls: few in CI, many at night."""
    return pytest.mark.parametrize(
        "calls", [small, pytest.param(large, marks=[pytest.mark.nightly, pytest.mark.slow])]
    )


@pytest.fixture
def judged(kvbench: Call) -> Iterator[Callable[..., int]]:
    """Return a function that runs a command and checks how it ends."""

    def hang(*_: object) -> NoReturn:
        raise TimeoutError(f"still busy after {LONGEST_S} s")

    def call(*args: str, lines: int = MOST_LINES) -> int:
        signal.alarm(LONGEST_S)
        try:
            done = kvbench(*args)
        except BaseException as error:
            error.add_note(f"kvbench {args}")
            raise
        finally:
            signal.alarm(0)
        said = done.stderr.strip().splitlines()
        assert done.returncode in CODES, args
        assert "Traceback" not in done.stderr, args
        assert len(said) <= lines, (args, said)
        assert done.returncode != 2 or said or done.stdout, args
        return int(done.returncode)

    before = signal.signal(signal.SIGALRM, hang)
    yield call
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def runs(kvbench: Call, tmp_path: Path) -> list[Path]:
    """Two runs with transcripts, a baseline and a submission of the first, and an index."""
    for agent in ("gold", "null"):
        args = ["--engine", "scripted", "--model", agent, "--task", "micro/recall-1k"]
        assert kvbench("run", *args, "--limit", "2", "-q").returncode == 0
    found = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert kvbench("baseline", "save", "base", str(found[0]), "--to", "kept").returncode == 0
    packed = ["--to", "sub", "--who", "me", "--method", "full"]
    assert kvbench("leaderboard", "pack", str(found[0]), *packed).returncode == 0
    assert kvbench("ls", "runs").returncode == 0
    return found


def run_files(runs: list[Path], home: Path) -> dict[Path, list[list[str]]]:
    """Return every file of a run, baseline and submission with the commands that read it."""
    first, second = map(str, runs)
    id_ = json.loads((runs[0] / "samples.jsonl").read_bytes().splitlines()[0])["sample_id"]
    reading = [
        ["show", first], ["show", first, "--sample", id_], ["show", first, "--json"],
        ["ls", "runs"], ["ls", "runs", "--json", "--sort", "score"], ["summarize", first],
        ["report", "runs"], ["report", "runs", "--json"], ["compare", first, second],
        ["export", first, "--to", "x.jsonl", "--force"], ["baseline", "save", "b", first],
        ["compare", "kept/base.json", first],
    ]  # fmt: skip
    checking = [["leaderboard", "validate", "sub"], ["leaderboard", "add", "sub", "--to", "lb"]]
    packed = home / "sub" / runs[0].name
    kept = [["compare", "kept/base.json", first], ["compare", "--plan", "kept/base.json"]]
    names = ("run.json", "samples.jsonl", "turns.jsonl", "summary.json")
    transcript = next((runs[0] / "transcripts").iterdir())
    return {
        **{runs[0] / name: reading for name in names},
        transcript: [["show", first, "--sample", id_]],
        home / "runs" / ".kvbench-index.json": [["ls", "runs"]],
        home / "kept" / "base.json": kept,
        home / "sub" / "submission.json": checking,
        **{packed / name: checking for name in names[:3]},
        packed / "transcripts" / transcript.name: checking,
    }


@sizes(150, 100_000)
def test_damaged_runs_baselines_and_submissions(
    runs: list[Path], tmp_path: Path, damaged: Damage, judged: Callable[..., int], calls: int
) -> None:
    files = run_files(runs, tmp_path)
    whole = {path: path.read_bytes() for path in files}
    random, codes = Random(calls), Counter[int]()
    for number in range(calls):
        path = list(files)[number % len(files)]
        path.write_bytes(damaged(random, whole[path]))
        command = random.choice(files[path])
        # A submission's findings are listed, a line each.
        codes[judged(*command, lines=200 if command[0] == "leaderboard" else 20)] += 1
        for left in ("lb", "baselines"):
            shutil.rmtree(tmp_path / left, ignore_errors=True)
        for each in (path, runs[0] / "summary.json"):
            each.write_bytes(whole[each])
    assert codes[0] > calls // 50
    assert codes[2] > calls // 50


def arrays(tokens: int = 40) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"q": (2, 4, tokens, 8), "k": (2, 2, tokens, 8), "v": (2, 2, tokens, 8)}
    found: dict[str, Any] = {
        name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()
    }
    places = np.arange(tokens)
    found |= {"phase": random.integers(0, 4, tokens), "tokens": places, "positions": places}
    found |= {"decoded": places > 12, "now": np.array(30), "prompt": np.array(12)}
    for name in ("q_mean_real", "q_mean_imag", "q_abs_mean"):
        found[name] = random.random((2, 4, 4), np.float32)
    return found | {"inv_freq": random.random(4, np.float32)}


def capture_files(kvbench: Call, home: Path) -> dict[Path, list[list[str]]]:
    """Return captures and traces in each of their formats with the commands that read them."""
    meta = '{"model": "m"}'
    np.savez(home / "a.npz", meta=np.array(meta), **arrays())
    np.savez_compressed(home / "b.npz", meta=np.array(meta), **arrays())
    shaped = {name: np.atleast_1d(array) for name, array in arrays().items()}
    save_file(shaped, home / "c.safetensors", metadata={"meta": meta})
    files: dict[Path, list[list[str]]] = {}
    for name in ("a.npz", "b.npz", "c.safetensors"):
        read = ["--capture", name]
        replay = ["analyze", "timeline", *read, "--method", "triattention", "--budget", "20"]
        files[home / name] = [
            ["select", "--method", "agentkv", "--budget", "33", *read, "--out", "o.npz"],
            ["analyze", "angles", *read], ["analyze", "coverage", *read, "--budget", "8"],
            [*replay, "--set", "interval=8"],
        ]  # fmt: skip
    for name in ("t.npz", "t.safetensors"):
        replay = ["--capture", "a.npz", "--method", "rkv@code", "--budget", "12"]
        options = ["--set", "interval=8", "--out", name]
        assert kvbench("analyze", "timeline", *replay, *options).returncode == 0
        files[home / name] = [["analyze", "timeline", "--trace", name]]
    return files


@sizes(100, 100_000)
def test_damaged_captures_and_traces(
    kvbench: Call, tmp_path: Path, damaged: Damage, judged: Callable[..., int], calls: int
) -> None:
    files = capture_files(kvbench, tmp_path)
    whole = {path: path.read_bytes() for path in files}
    random, codes = Random(calls), Counter[int]()
    for number in range(calls):
        path = list(files)[number % len(files)]
        path.write_bytes(damaged(random, whole[path]))
        codes[judged(*random.choice(files[path]))] += 1
        path.write_bytes(whole[path])
    assert codes[2] > calls // 10


@sizes(40, 20_000)
def test_damaged_model_folders(
    tmp_path: Path,
    damaged: Damage,
    judged: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
) -> None:
    """With a setting of the folder or the weights damaged, gone, or a folder itself."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    folder = write_model(tmp_path / "model", "qwen3")
    (tmp_path / "text.txt").write_text("hello world, a text of some length. " * 20)
    commands = [
        ["calibrate", "--model", "./model", "--text", "text.txt"],
        ["ls", "tasks", "--lengths", "--task", "micro/recall-1k", "--limit", "1"],
        ["run", "--task", "micro/recall-1k", "--limit", "1", "--budget", "64", "-q"],
    ]
    commands[1] += ["--model", "./model"]
    commands[2] += ["--model", "./model", "--max-tokens", "4"]
    whole = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    random, codes = Random(calls), Counter[int]()
    for number in range(calls):
        path = list(whole)[number % len(whole)]
        path.unlink()
        match random.randrange(12):
            case 0:
                path.mkdir()
            case kind if kind > 1:
                path.write_bytes(damaged(random, whole[path]))
        embedded_model._load.cache_clear()
        codes[judged(*random.choice(commands))] += 1
        for left in ("home", "runs"):
            shutil.rmtree(tmp_path / left, ignore_errors=True)
        if path.is_dir():
            path.rmdir()
        path.write_bytes(whole[path])
    assert codes[2] > calls // 10


# ---- the command line ----

# What begins long work; that it was reached is all a command line is to show.
WORK = (
    "run.runner.run_all", "run.engines.start_engine", "engines.embedded.model._load",
    "gateway.http.run_server", "gateway.http.run_app", "environments.build.build",
    "environments.build.fetch", "environments.build.probe", "kernels.benchmark.measure",
    "conformance.methods.method_suite", "conformance.engines.engine_suite",
    "conformance.tasks.task_suite", "conformance.models._family_row",
    "serving_bench.bench.measure_serving",
    "adapters.browser.judge.judge_run", "results.trackers.track_runs", "run.evoke_demo.Demo",
    "cli.doctor.diagnose", "cli.sweep._run", "run.sidequest_training.train_sidequest",
)  # fmt: skip
NUMBERS = [
    "0", "-1", "1", "2", "7", "x", "", "1" * 400, "9" * 18, "9" * 19, "9" * 5000, "1e3", "\uff11",
    "0x10", "1_000", "nan", "inf", "-inf", "1e-320", "1e400", "3k", "25%", "0.0001%", "100%", "64",
    "1" * 400 + "%", "3072", "0." + "0" * 400 + "1%", " 5 ", "+5",
]  # fmt: skip
PATHS = [
    "", ".", "nowhere", "x" * 300, "a/" + "y" * 256, "/proc/nowhere", "/proc/self/mem", "a.npz",
    "b.npz", "c.safetensors", "t.npz", "kept/base.json", "sub", "runs", "micro", "\udcff\udcfe",
    "a\nb", "\xe9", "s3://b/x", "memory://x", "file:///nowhere", "~nobody/x", "o.npz", "o.png",
    "o.csv", "o.parquet", "o.jsonl", "zip://a::b",
]  # fmt: skip
WORDS = [
    "agentkv", "snapkv", "full", "agentkv@paper", "x@", "@", "micro/recall-1k", "micro/*",
    "bfcl/multi_turn_base", "tau2/retail", "embedded", "scripted", "api", "vllm", "llamacpp",
    "gold", "float32", "cpu", "cuda:99", "meta", "score", "recurring", "pass^3", "pass^0",
    "pass^" + "9" * 30, "window=4", "interval=0", "=", "a=b=c", "window=" + "9" * 400, "gqa=x",
    "0,1", "0:0", "9" * 30 + ":0", "1-5", "5-1", "1-" + "9" * 20, "wandb", "markdown=x.md",
    "terminal=", "bfcl",
]  # fmt: skip


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every verb's words and its command."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        member = command.get_command(context, name)
        assert member is not None
        yield from leaves(member, (*path, name))


def value_of(random: Random, parameter: click.Parameter) -> str:
    """Draw a value, as often as not one that makes sense."""
    kind = parameter.type
    if isinstance(kind, click.Choice) and random.random() < 0.9:
        return str(random.choice(kind.choices))
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return random.choice(["1", "2", "3", "8"] if random.random() < 0.7 else NUMBERS)
    if "budget" in str(parameter.name):
        return random.choice(NUMBERS)
    return random.choice(random.choice([PATHS, WORDS, WORDS, NUMBERS]))


def command_line(random: Random, words: tuple[str, ...], command: click.Command) -> list[str]:
    args = list(words)
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            count = random.randrange(4) if parameter.nargs < 0 else parameter.nargs
            args += [value_of(random, parameter) for _ in range(count)]
        elif random.random() < (0.95 if parameter.required else 0.15):
            name = random.choice([*parameter.opts, *parameter.secondary_opts])
            plain = isinstance(parameter, click.Option) and parameter.is_flag
            args += [name] if plain else [name, value_of(random, parameter)]
    if random.random() < 0.05:
        args.append(random.choice(["--", "-", "--nope", "-h"]))
    return args + ["--limit", "1"] * ("--lengths" in args and "--limit" not in args)


@pytest.mark.slow
@sizes(10_000, 1_000_000)
def test_any_command_line(
    runs: list[Path],
    kvbench: Call,
    tmp_path: Path,
    judged: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path / "data"))
    capture_files(kvbench, tmp_path)

    def reached(*_: object, **__: object) -> NoReturn:
        raise PrerequisiteError("reached")

    for name in WORK:
        module, _, function = f"agentbench_kv.{name}".rpartition(".")
        monkeypatch.setattr(importlib.import_module(module), function, reached)
    # Every distribution's metadata is read for each; here they stay what they are.
    monkeypatch.setattr(registry, "_entry_points", cache(registry._entry_points))
    verbs = list(leaves(kvbench_group))
    codes, first = Counter[int](), int(os.environ.get("KVBENCH_FUZZ_FROM", "0"))
    for number in range(first, calls):
        # A line follows from its number, so that a long run can go on where it stopped.
        random = Random(number)
        words, command = verbs[number % len(verbs)]
        line = command_line(random, words, command)
        line = [random.choice([*map(str, runs), word]) if word == "runs" else word for word in line]
        # Tasks whose environment is not there are named, one a line; so are families of models.
        many = "--lengths" in line or line[:2] == ["selftest", "models"]
        try:
            codes[judged(*line, lines=60 if many else 20)] += 1
        except BaseException as error:
            error.add_note(f"line {number}; KVBENCH_FUZZ_FROM={number} begins with it")
            raise
    assert codes[0] > (calls - first) // 50
    assert codes[2] > (calls - first) // 2
