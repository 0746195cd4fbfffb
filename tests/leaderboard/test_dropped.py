"""Submissions of runs that drop messages: honest ones pass, edited ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.accounting import KVStats
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.aside import Aside
from agentbench_kv.gateway.session import Session
from agentbench_kv.leaderboard import validate
from agentbench_kv.results.submissions import Label
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

ARMS: dict[str, tuple[str, int | str | None, dict[str, str]]] = {
    "text": ("clear-tools", 700, {"keep": "1"}),
    "share": ("clear-tools", "60%", {"keep": "1"}),
    "span": ("clear-tools", 700, {"keep": "1", "exec": "span"}),
    "move": ("oracle-tools", 800, {"exec": "span+move"}),
    "lots": ("random-tools", 700, {"keep": "1"}),
    "window": ("turn-window", 700, {}),
    "summary": ("summarise", 700, {"summary_tokens": "48"}),
    "asked": ("sidequest-prompted", None, {"exec": "text"}),
    "forked": ("sidequest-prompted", None, {}),
}
NOT_REPLAYED = ("summary", "asked")


class Answering:
    """Has every question which results are expired answered in the same way; asks for the rest."""

    def __init__(self, genuine: Callable[..., Aside]) -> None:
        self._genuine = genuine

    def __call__(self, gateway: Gateway, state: Session, asked: Sequence[Any], *rest: Any) -> Aside:
        if "Memory management mode" not in asked[-1]["content"]:
            return self._genuine(gateway, state, asked, *rest)
        paid = KVStats(prefill_tokens=7, decode_tokens=3)
        return Aside(lambda: '{"del_cursors": [0]}', lambda: paid)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Honest runs, never written to."""
    root, found = tmp_path_factory.mktemp("dropped"), {}
    answering = Answering(Gateway._aside)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gateway, "_aside", lambda *given: answering(*given))
        for name, (method, budget, settings) in ARMS.items():
            spec = RunSpec("embedded", "micro", method, budget, task="micro/recall-1k", limit=1)
            found[name] = root / run_one(resolve(spec, settings), root, lambda *_: None).run_id
    return found


@pytest.fixture
def packed(runs: dict[str, Path], tmp_path: Path, forger_of: Callable[..., Any]) -> Any:
    return lambda name: forger_of(runs[name], tmp_path / "submission")


@pytest.mark.parametrize("name", ARMS)
def test_an_honest_run_can_be_submitted(packed: Any, name: str) -> None:
    verdict = validate(packed(name).folder)
    assert not verdict.findings, [str(each) for each in verdict.findings[:5]]
    (run,) = verdict.runs
    assert run.label is (Label.SELF_REPORTED if name in NOT_REPLAYED else Label.RESCORED)
    if name in NOT_REPLAYED:
        assert "what the model said beside the session" in run.notes[0]


def a_wider_bound(f: Any) -> None:
    f.trials(lambda row: row["kv"].update(longest_prefill=row["kv"]["longest_prefill"] + 50))


def a_lower_peak(f: Any) -> None:
    def edit(row: dict[str, Any]) -> None:
        row["kv"].update(peak_alone=row["kv"]["peak_alone"] - 40)

    f.trials(edit)


def nothing_read_again(f: Any) -> None:
    f.trials(lambda row: row["kv"].update(recomputed=0))


def more_ever_seen(f: Any) -> None:
    f.trials(lambda row: row["kv"].update(logical=row["kv"]["logical"] * 3))


def a_shorter_prompt(f: Any) -> None:
    """Claim shorter prompts at rewrites than what was left, in turns and their sums."""

    def edit(row: dict[str, Any]) -> None:
        row["prompt_tokens"] -= 50 * bool(row["events"])

    f.turns(edit)
    events = {(row["sample_id"], row["trial"]): 0 for row in f.lines("turns.jsonl")}
    for row in f.lines("turns.jsonl"):
        events[row["sample_id"], row["trial"]] += bool(row["events"])

    def sums(row: dict[str, Any]) -> None:
        row["usage"]["prompt_tokens"] -= 50 * events[row["sample_id"], row["trial"]]

    f.trials(sums)


def nothing_written_anew(f: Any) -> None:
    f.trials(lambda row: row["kv"].update(rewrites=0))


def asked_for_less(f: Any) -> None:
    f.trials(lambda row: row["kv"].update(auxiliary_tokens=1, auxiliary_calls=1))


def another_policy(f: Any) -> None:
    """Show what one setting made of the task as what another did."""
    f.info(lambda info: info["spec"]["params"].update(keep=2))
    f.info(lambda info: info["provenance"].update(changed_settings={"keep": 2}))
    f.cover(rename=True)


EVERYWHERE = (a_wider_bound, nothing_read_again, more_ever_seen, a_shorter_prompt)
REPLAYED = (a_lower_peak, nothing_written_anew, asked_for_less, another_policy)


@pytest.mark.parametrize(
    ("name", "forge"),
    [(name, forge) for name in ("text", *NOT_REPLAYED) for forge in EVERYWHERE]
    + [("text", forge) for forge in REPLAYED]
    + [("span", forge) for forge in (a_wider_bound, a_lower_peak, asked_for_less, another_policy)],
)
def test_an_edited_run_is_refused(packed: Any, name: str, forge: Callable[[Any], None]) -> None:
    made = packed(name)
    forge(made)
    assert validate(made.cover()).findings


def test_sidequest_on_a_model_that_was_not_trained_is_refused(packed: Any) -> None:
    made = packed("forked")
    made.info(lambda info: info["spec"].update(method="sidequest"))
    findings = validate(made.cover(rename=True)).findings
    assert ["was not trained for sidequest" in str(each) for each in findings] == [True]
