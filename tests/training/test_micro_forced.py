"""Forced sessions, against teacher forcing by the training code's own model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentbench_kv.adapters.micro.generate import PROFILES, held_out_seed
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.training.micro.data import RowEncoder, episode_row
from agentbench_kv.training.micro.evaluate import evaluate
from agentbench_kv.training.micro.model import load_model
from agentbench_kv.training.micro.tokenizer import build_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import micro_forced as forced


@pytest.fixture(scope="module")
def played():
    arms = (("full", None), ("streamingllm", 256), ("agentkv", 256))
    return {
        method: next(forced.play_arm("micro", "recall-1k", method, budget, [3], 1))
        for method, budget in arms
    }


def test_a_full_cache_finds_what_teacher_forcing_finds(played):
    row = episode_row(RowEncoder(build_tokenizer()), held_out_seed(3), PROFILES["recall-1k"])
    report = evaluate(load_model(model_path("micro")), [row])
    full = played["full"]
    assert (full.tokens, full.events, full.within) == (len(row.ids), 0, None)
    assert sum(asked for _, asked in full.counts.values()) == 17
    for name, (right, asked) in full.counts.items():
        assert right / asked == report.recall[name] == 1.0


def test_a_window_loses_what_was_said_before_it(played):
    """The gates of the system prompt and the first message; the budget holds for what is forced."""
    lost = played["streamingllm"]
    assert lost.events >= 2
    assert lost.counts["others/one_shot"][0] == 0
    assert lost.within is None


def test_rings_are_counted_where_there_are_any(played):
    inside, held = played["agentkv"].within
    assert held == 32 * played["agentkv"].events > 0
    assert held / 4 <= inside <= held


def test_a_script_is_kept_to():
    script = forced.Script([5, 2], 8)
    assert script.allowed().nonzero()[0].tolist() == [5]
    script.accept(5)
    assert script.allowed().nonzero()[0].tolist() == [2]
    with pytest.raises(RuntimeError, match="against the script"):
        script.accept(5)


def test_what_was_played_is_read_again_and_tabled(played, tmp_path):
    from dataclasses import asdict
    from json import dumps

    path = tmp_path / "forced.jsonl"
    path.write_text("".join(dumps(asdict(each)) + "\n" for each in played.values()), "utf-8")
    again = forced.read(path)
    assert again == list(played.values())
    text = forced.table("recall-1k", again, forced.SOURCES, "agentkv")
    assert text.count("\n") == 4
    assert text.splitlines()[2].startswith("|  | full | 100.0 ")
