"""`kvbench fidelity` end to end: recordings, what costs nothing, resuming, one's own run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import fidelity
from agentbench_kv.run.recordings import kinds_of, record_gold, record_run

TASK = "micro/recall-1k"


def call(*words: str) -> Any:
    return CliRunner().invoke(kvbench, list(words), catch_exceptions=False)


def played(out: Path, *more: str) -> list[dict[str, Any]]:
    result = call("fidelity", "--task", TASK, "--limit", "2", "--out", str(out), "--json", *more)
    assert result.exit_code == 0, result.output
    lines: list[dict[str, Any]] = json.loads(result.stdout)
    return lines


def test_recordings_are_what_the_gold_agent_says() -> None:
    first, second = record_gold(TASK, "micro", 2, {})
    again, _ = record_gold(TASK, "micro", 2, {})
    assert first.sha == again.sha != second.sha
    codec = TokenCodec(load_tokenizer(Path("agentbench_kv/models/micro").resolve()))
    parts = [(*turn.prompt, *turn.answer) for turn in first.turns]
    text = codec.decode([token for part in parts for token, _ in part])
    assert text.count("<|im_start|>assistant") == len(first.turns)
    for turn in first.turns:
        assert codec.decode([token for token, _ in turn.answer]).endswith("<|im_end|>")
        assert len(turn.kinds) == len(turn.answer)
    assert {phase for turn in first.turns for _, phase in turn.answer} >= {Phase.THINK, Phase.ACT}


def test_kinds_of_a_call() -> None:
    codec = TokenCodec(load_tokenizer(Path("agentbench_kv/models/micro").resolve()))
    said = '{"name": "find", "arguments": {"key": ["a", 5], "last": true}}'
    ids = codec.encode(f"<tool_call>\n{said}\n</tool_call>")
    answer = [(token, Phase.ACT) for token in ids]
    kinds = kinds_of(codec, (*codec_text(codec, "Now. "), *answer))
    pairs = zip(ids, kinds[-len(ids) :], strict=True)
    values = "".join(codec.decode([token]) for token, kind in pairs if kind == "value")
    for word in ("find", "a", "5", "true"):
        assert word in values
    for word in ("name", "arguments", "key", "last", "tool_call"):
        assert word not in values
    assert kinds[0] == "text"
    assert "template" in kinds


def codec_text(codec: TokenCodec, text: str) -> tuple[tuple[int, Phase], ...]:
    return tuple((token, Phase.OTHERS) for token in codec.encode(text))


def test_a_budget_beyond_the_session_changes_nothing(tmp_path: Path) -> None:
    (line,) = played(tmp_path, "--method", "agentkv", "--budget", "100000")
    assert line["means"]["kl"]["point"] < 1e-6
    assert line["shares"]["top1"]["point"] == 1
    assert line["events"] == 0


def test_tokens_are_counted_from_the_last_event(tmp_path: Path) -> None:
    (line,) = played(tmp_path, "--method", "random", "--budget", "200", "--set", "interval=40")
    (name,) = RunStore(tmp_path).names()
    for record in RunStore(tmp_path).find(name).trials():
        counts = {n.removeprefix("kl"): c for n, (_, c) in record.means.items()}
        assert counts["_to1"] == record.kv.events > 3
        assert counts["_to8"] == 7 * record.kv.events
        groups = ("_before", "_to1", "_to8", "_to32", "_to128")
        assert sum(counts.get(group, 0) for group in groups) == counts[""]
        # Events are 40 tokens apart, so nothing is farther from one than that.
        assert counts["_to128"] <= 8 * record.kv.events
    assert line["events"] > 3


def test_less_budget_costs_more_and_every_figure_is_there(tmp_path: Path) -> None:
    budgets = ("--budget", "128", "--budget", "512")
    small, large = played(tmp_path, "--method", "streamingllm", *budgets)
    assert small["means"]["kl"]["point"] > large["means"]["kl"]["point"] > 0
    assert small["shares"]["top1"]["point"] < 1
    assert {"kl_act", "kl_value", "kl_template", "kl_to32", "kl_turn3"} <= small["means"].keys()
    assert large["against_first"]["n"] == 2
    assert small["p_value"] is None


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ("--method", "random", "--method", "h2o", "--budget", "200")
    whole = played(tmp_path / "whole", *arms)
    play, calls = fidelity._play, []

    def stops(model: Any, recording: Any, missing: Any) -> None:
        calls.append([recording.sample, len(missing)])
        if len(calls) == 2:
            raise KeyboardInterrupt
        play(model, recording, missing)

    monkeypatch.setattr(fidelity, "_play", stops)
    command = ["fidelity", "--task", TASK, "--limit", "2", "--out", str(tmp_path / "cut"), *arms]
    assert call(*command).exit_code != 0
    assert played(tmp_path / "cut", *arms) == whole
    assert [count for _, count in calls] == [2, 2, 2]
    # What is there is not played again: another arm is played alone.
    played(tmp_path / "cut", *arms, "--method", "streamingllm")
    assert [count for _, count in calls[3:]] == [1, 1]


def test_sessions_of_other_tokens_are_not_mixed(tmp_path: Path) -> None:
    arm = ("--method", "random", "--budget", "200", "--out", str(tmp_path))
    command = ["fidelity", "--task", TASK, "--limit", "1", *arm]
    assert call(*command).exit_code == 0
    (name,) = RunStore(tmp_path).names()
    file = tmp_path / name / "samples.jsonl"
    (recording,) = record_gold(TASK, "micro", 1, {})
    file.write_text(file.read_text().replace(recording.sha, "0" * 64))
    result = CliRunner().invoke(kvbench, command)
    assert result.exit_code != 0
    assert "holds another session" in str(result.exception)


@pytest.mark.parametrize("method", ["agentkv", "snapkv", "h2o", "rkv"])
def test_a_run_of_ones_own_is_one_hundred_percent(tmp_path: Path, method: str) -> None:
    arm = ("--method", method, "--budget", "256", "--set", "interval=64")
    common = ("--out", str(tmp_path), *arm)
    command = ("run", "--task", TASK, "--limit", "2", "--concurrency", "1", "--quiet")
    assert call(*command, *common).exit_code == 0
    (name,) = RunStore(tmp_path).names()
    run = RunStore(tmp_path).find(name)
    result = call("fidelity", "--from", str(run.path), *common, "--json")
    assert result.exit_code == 0, result.output
    (line,) = json.loads(result.stdout)
    assert line["shares"]["right"]["point"] == 1
    assert line["events"] * 2 == sum(record.kv.events for record in run.trials()) > 0
    recordings, model = record_run(run.path)
    assert model == "micro"
    assert sum(r.tokens for r in recordings) == sum(t.kv.logical for t in run.trials())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "agentkv", "--budget", "256"), "--task TASK, or --from RUN"),
        (("--method", "agentkv", "--task", TASK), "needs a budget"),
        (("--method", "evoke", "--budget", "4096", "--task", TASK), "ranks no rows"),
        (("--method", "oracle", "--budget", "256", "--task", TASK), "ranks no rows"),
        (("--method", "full", "--task", TASK, "--set", "moon=1"), "moon"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_said_in_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(kvbench, ["fidelity", *words, "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)
