"""`benchmarks/gpu_check.py` as far as it goes without a GPU: checks, limits, commands, verdicts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu_check
from gpu_check import Outcome, Stage, check_kernels, command, conclude, play, stages

from agentbench_kv.cli import kvbench
from agentbench_kv.kernels import dispatch
from agentbench_kv.kernels.torch_backend import TorchBackend
from agentbench_kv.serving_bench.roofline import read_decoder


def test_without_a_gpu_it_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [gpu_check.NO_GPU]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def compiled() -> Any:
    found = dispatch.active_backend("cpu")
    if found.name == "torch":
        pytest.skip(f"no compiled kernels here: {found.about}")
    return found


@pytest.mark.usefixtures("compiled")
def test_sound_kernels_pass() -> None:
    outcome = check_kernels("cpu")
    assert outcome.passed, outcome.said
    assert len(outcome.said) == 1 + 2 * 15


def garbled(words: Any) -> None:
    """Leave the first channel of the keys right, and no other."""
    keys, _ = words[0]
    for layer in keys.layers:
        layer[..., 1:] = layer[..., 1:].roll(1, -1)


def torn(words: Any) -> None:
    """Put other rows' values beside the keys."""
    _, values = words[0]
    for layer in values.layers:
        layer.copy_(layer.roll(1, 2))


@pytest.mark.parametrize(
    ("operation", "spoil"),
    [
        ("select_top", lambda found, _: found.roll(1, -1)),
        ("attention_mass", lambda found, _: found * 1.001),
        ("compact_paged", lambda found, _: found + 1),
        ("compact_paged", lambda found, words: (garbled(words), found)[1]),
        ("compact_paged", lambda found, words: (torn(words), found)[1]),
        ("rope_rotate", lambda _, words: words[0].layers[1].mul_(1.02)),
        ("rope_rotate", lambda _, words: words[0].layers[0].copy_(words[0].layers[0].roll(1, -1))),
        ("ring_write", lambda _, words: words[0].copy_(words[0].roll(1, 0))),
        ("similarity_column_mean", lambda found, _: found * 1.001),
        ("aabb", lambda found, _: (found[0], *(each * 1.001 for each in found[1:]))),
        ("aabb_score", lambda found, _: found + 0.1),
    ],
)
def test_a_wrong_kernel_is_named(
    operation: str, spoil: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = getattr(compiled, operation)
    wrong = SimpleNamespace(**{name: getattr(compiled, name) for name in dir(compiled)
                               if not name.startswith("__")})  # fmt: skip

    def called(*words: Any, **named: Any) -> Any:
        return spoil(sound(*words, **named), words)

    setattr(wrong, operation, called)
    monkeypatch.setattr(gpu_check, "active_backend", lambda _device: wrong)
    outcome = check_kernels("cpu")
    assert outcome.passed is False
    failed = [line for line in outcome.said if line.startswith("FAILED")]
    assert failed
    assert all(operation.partition("_paged")[0] in line for line in failed)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda found: found[:, :-1],
        lambda found: torch.cat([found[:, :1], found[:, :-1]], -1),  # a row twice
        lambda found: torch.cat([found[:, :-1], found[:, -1:] + 5000], -1),
        lambda found: torch.where(torch.arange(701) == 0, found[:, :1] // 2, found),  # one below
    ],
)
def test_where_positions_are_twice_rows_are_chosen_once_and_none_below_the_last(
    spoilt: Any,
) -> None:
    sound = TorchBackend()
    g = torch.Generator().manual_seed(0)
    scores, places = torch.randn(2, 5000, generator=g), torch.randperm(5000, generator=g) // 2
    scores[:, ::7] = 1.5
    words = scores, places.expand(2, -1).contiguous()
    assert gpu_check._top_apart(sound, sound, *words) == 0
    wrong = SimpleNamespace(select_top=lambda *given: spoilt(sound.select_top(*given)))
    assert gpu_check._top_apart(wrong, sound, *words) > 0


def test_rings_that_come_back_changed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check.rings_put_aside("cpu") == []
    monkeypatch.setattr(gpu_check.QueryBuffer, "from_host", lambda *_: None)
    (found,) = gpu_check.rings_put_aside("cpu")[:1]
    assert found.startswith("FAILED rings of session 0")


def test_without_compiled_kernels_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fallen_back = SimpleNamespace(name="torch", about="in place of cuda kernels: no nvcc")
    monkeypatch.setattr(gpu_check, "active_backend", lambda _device: fallen_back)
    outcome = check_kernels("cpu")
    assert outcome.passed is False
    assert "no nvcc" in outcome.said[0]


def test_no_stage_stops_the_others_and_none_begins_too_late() -> None:
    def broken(_: float) -> Outcome:
        raise ValueError("a fault")

    limits: list[float] = []

    def sound(limit_s: float) -> Outcome:
        limits.append(limit_s)
        return Outcome("x", True)

    said: list[str] = []
    todo = [Stage("first", 9, broken), Stage("second", 9, sound), Stage("third", 900, sound)]
    done = play(todo, 60, said.append)
    assert [each.passed for each in done] == [False, True, True]
    assert done[0].said == ["ValueError: a fault"]
    assert limits[0] == 9
    assert 5 < limits[1] <= 60
    assert [each.needed for each in done] == [False] * 3
    late = play([replace(each, needed=True) for each in todo], 4, said.append)
    assert all(each.needed for each in late)
    assert [each.passed for each in late] == [None] * 3
    assert "the time is over" in late[0].said[0]


def test_commands_are_judged_by_their_exit(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert command("x", ["--help"], log, 900).passed is True
    missing = command("x", ["bench", "roofline"], log, 900)
    assert missing.passed is False  # what nobody can have asked for
    assert "exit 2" in missing.said[-1]
    slow = command("x", ["--help"], log, 0.01)
    assert slow.passed is None
    assert "not finished" in slow.said[0]


def test_the_roofline_is_asked_for_what_was_measured_below_its_folder(tmp_path: Path) -> None:
    (stage,) = [each for each in stages(["embedded"], tmp_path) if "roofline" in each.name]
    nothing = stage.run(5)
    assert (nothing.passed, nothing.said) == (None, ["there is no throughput to hold against it"])
    below = tmp_path / "load-embedded" / "serving-embedded-micro-1"
    below.mkdir(parents=True)
    (below / "serving.json").write_text("{}")
    (below / "rep01-x.json").write_text("{}")
    assert stage.run(60).passed is False  # the command was asked, and refuses such a folder


def test_every_command_is_one_of_ours(tmp_path: Path) -> None:
    """Options that were renamed would show on somebody's GPU only."""
    found = stages(list(gpu_check.ENGINES), tmp_path)
    checked = 0
    for stage in found:
        words = getattr(stage.run, "args", ())[1:2]
        if words and isinstance(words[0], list):
            here, rest = kvbench, list(words[0])
            while hasattr(here, "commands"):
                here = here.get_command(None, rest.pop(0))  # type: ignore[arg-type, assignment]
            assert "roofline" in words[0] or words[0][words[0].index("--device") + 1] == "cuda"
            here.make_context("x", rest)
            checked += 1
    assert checked == 1 + 3 * len(gpu_check.ENGINES)


@pytest.mark.parametrize(
    ("memory", "share", "together"), [(80e9, "0.3", True), (48e9, "0.9", False), (24e9, "", False)]
)
def test_throughput_asks_for_no_more_than_the_gpu_has(
    tmp_path: Path, memory: float, share: str, together: bool
) -> None:
    found = {each.name: each.run for each in stages(["vllm"], tmp_path, int(memory))}
    run = found["vllm: throughput"]
    if not share:
        outcome = run(1)
        assert (outcome.passed, "24 GB" in outcome.said[0]) == (None, True)
        assert "vllm: share of the roofline" not in found
        return
    words = run.args[1]  # type: ignore[attr-defined]
    assert f"gpu-memory-utilization={share}" in words
    assert ("--together" in words) is together


@pytest.mark.parametrize("engine", gpu_check.ENGINES)
def test_correctness_has_the_time_it_takes_and_leaves_some(engine: str, tmp_path: Path) -> None:
    needed = {each.name: each.limit_s for each in stages([engine], tmp_path) if each.needed}
    assert list(needed) == ["kernels against PyTorch", "CUDA graphs", f"{engine}: selftest"]
    assert needed[f"{engine}: selftest"] >= 3 * 77  # starts of vLLM with nothing compiled
    assert sum(needed.values()) <= gpu_check.MINUTES * 60 - 60


def test_the_folder_of_shapes_is_qwen3_8b(tmp_path: Path) -> None:
    found = read_decoder(gpu_check.shapes_folder(tmp_path / "shapes"))
    assert found.common == 6_945_767_424
    assert not list((tmp_path / "shapes").glob("*.safetensors"))


def test_the_end_says_what_to_send_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound, unknown, wrong = Outcome("a", True), Outcome("b", None), Outcome("c", False)
    assert conclude([sound, unknown], {"gpu": "x"}, tmp_path) == 0
    unfinished = Outcome("d", None, needed=True)
    assert conclude([sound, unknown, unfinished], {"gpu": "x"}, tmp_path) == 1
    assert "1 of 3 passed; NOT CHECKED: d; not judged: b" in capsys.readouterr().out
    assert conclude([sound, wrong, unknown], {"gpu": "x"}, tmp_path) == 1
    printed = capsys.readouterr().out
    assert "1 of 3 passed; FAILED: c; not judged: b" in printed
    assert "send back:" in printed
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [each["passed"] for each in report["stages"]] == [True, False, None]


def test_an_engine_without_its_environment_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    assert gpu_check.installed() == ["embedded"]


@pytest.mark.parametrize(
    ("there", "named", "played", "minutes", "said"),
    [
        (["vllm", "sglang", "embedded"], [], ["vllm"], 8,
         "engines: vllm; left out: sglang, embedded (to check them: --engine sglang --engine "
         "embedded); not installed: none"),
        (["embedded"], [], ["embedded"], 8,
         "engines: embedded; left out: none; not installed: vllm, sglang"),
        (["sglang", "embedded"], ["embedded", "sglang"], ["sglang", "embedded"], 16,
         "engines: sglang, embedded; left out: none; not installed: vllm"),
        (["embedded"], ["vllm"], [], 0, ""),
    ],
)  # fmt: skip
def test_one_serving_engine_is_checked_unless_others_are_named(
    there: list[str], named: list[str], played: list[str], minutes: int, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "use_backend", lambda _name: None)
    monkeypatch.setattr(gpu_check, "installed", lambda: there)
    monkeypatch.setattr(gpu_check, "hardware", dict)
    gpu = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _number: gpu)
    monkeypatch.setattr(gpu_check, "stages", lambda engines, *_: asked.append(engines))
    monkeypatch.setattr(gpu_check, "play", lambda _todo, seconds, _say: asked.append(seconds) or [])
    words = [word for name in named for word in ("--engine", name)]
    code = gpu_check.main(["--out", str(tmp_path / "out"), *words])
    printed = capsys.readouterr()
    if not played:
        assert (code, asked) == (2, [])
        assert printed.err == "vllm is not installed: kvbench env create vllm-cuda\n"
        return
    assert (code, asked) == (0, [played, minutes * 60])
    assert printed.out.splitlines()[1] == said
