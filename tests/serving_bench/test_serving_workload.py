"""Shapes, prompts and arrivals: what is sent, before anything is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases import PhaseMachine, PhaseTable, load_tokenizer
from agentbench_kv.serving_bench.jobs import Load, SessionShape, Vocabulary, Workload
from agentbench_kv.serving_bench.loadgen import poisson
from agentbench_kv.serving_bench.prompts import Speaker, read_vocabulary

MICRO = Path(__file__).parents[2] / "agentbench_kv" / "models" / "micro"


@pytest.mark.parametrize(
    ("text", "prompt", "output"),
    [
        ("16k/1k", 16384, 1024),
        ("32K/1k", 32768, 1024),
        ("2000/128", 2000, 128),
        ("1k/100", 1024, 100),
    ],
)
def test_shapes_are_read_and_spelled(text: str, prompt: int, output: int) -> None:
    shape = SessionShape.parse(text)
    assert (shape.prompt, shape.output) == (prompt, output)
    assert shape.label == text.lower()


@pytest.mark.parametrize(
    "text", ["16k", "16k/", "0/5", "5/0", "1.5k/1k", "a/b", "-1/5", "1k/2k/3k"]
)
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected prompt/generated"):
        SessionShape.parse(text)


def test_a_session_is_as_long_as_its_turns() -> None:
    workload = Workload(SessionShape(100, 10), turns=3, tool_tokens=7)
    (session,) = workload.sessions(1)
    assert session.length == 100 + 3 * 10 + 2 * 7
    assert session.prompts == [100, 117, 134]


@pytest.mark.parametrize(
    ("load", "label", "at_once"),
    [
        (Load(16, concurrency=8), "c8", 8),
        (Load(4, concurrency=8), "c8", 4),
        (Load(1, concurrency=8, warmup=3), "c8", 3),
        (Load(32, rate=2.0), "2/s", 32),
        (Load(32, rate=0.25), "0.25/s", 32),
        (Load(32), "schedule", 32),
    ],
)
def test_a_load_says_how_many_sessions_can_be_open(load: Load, label: str, at_once: int) -> None:
    assert (load.label, load.at_once) == (label, at_once)


@pytest.mark.parametrize("tool", [1, 12, 30, 31, 60, 300])
@pytest.mark.parametrize("prompt", [1, 24, 25, 26, 100, 460, 500, 2048])
def test_prompts_have_exactly_the_lengths_asked_for(prompt: int, tool: int) -> None:
    workload = Workload(SessionShape(prompt, 8), turns=3, tool_tokens=tool)
    for vocabulary in (Vocabulary(50, special=[3]), read_vocabulary(MICRO)):
        prompts = Speaker(vocabulary, seed=1).prompts(0, *workload.sessions(1))
        assert [len(ids) for ids in prompts] == [prompt, tool, tool]
        assert all(0 <= token < vocabulary.size for ids in prompts for token in ids)


def test_random_ids_are_never_special() -> None:
    vocabulary = Vocabulary(10, special=[0, 4, 9])
    (session,) = Workload(SessionShape(500, 1)).sessions(1)
    (ids,) = Speaker(vocabulary, seed=0).prompts(0, session)
    assert set(ids) == {1, 2, 3, 5, 6, 7, 8}


def test_prompts_depend_on_seed_and_session_only() -> None:
    vocabulary = read_vocabulary(MICRO)
    (session,) = Workload(SessionShape(600, 8), turns=2).sessions(1)
    said = {
        (seed, n): Speaker(vocabulary, seed).prompts(n, session) for seed in (0, 1) for n in (0, 1)
    }
    assert Speaker(vocabulary, 1).prompts(1, session) == said[1, 1]
    assert len({str(prompts) for prompts in said.values()}) == 4


def test_a_session_has_every_phase_and_its_answers_are_thoughts() -> None:
    workload = Workload(SessionShape(1000, 8), turns=2, tool_tokens=120)
    first, second = Speaker(read_vocabulary(MICRO), seed=0).prompts(0, *workload.sessions(1))
    machine = PhaseMachine(PhaseTable.for_tokenizer(load_tokenizer(MICRO)))
    phases = machine.label_many(first)
    counts = {phase: phases.count(phase) for phase in Phase}
    # Two rounds of thought, call and tool answer fit into 1,000 tokens.
    assert counts[Phase.THINK] >= 2 * 96
    assert counts[Phase.ACT] >= 2 * 32
    assert counts[Phase.TOOL] >= 2 * 256
    assert machine.state.phase is Phase.THINK
    assert set(machine.label_many(second)) == set(Phase)
    assert machine.state.phase is Phase.THINK


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PrerequisiteError, match="cannot read"):
        read_vocabulary(tmp_path)


def test_open_loop_arrivals_are_poisson_and_repeatable() -> None:
    starts = poisson(4.0, 20_000, seed=3)
    assert starts == poisson(4.0, 20_000, seed=3)
    assert starts != poisson(4.0, 20_000, seed=4)
    gaps = np.diff(starts)
    assert starts[0] == 0.0
    assert (gaps > 0).all()
    # An exponential's mean and deviation are equal; with this seed they are what they are.
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert np.allclose(np.array(starts) * 4, poisson(1.0, 20_000, seed=3))
    assert poisson(1.0, 1, seed=0) == [0.0]
