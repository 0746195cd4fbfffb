"""Evidence that was sent or recalled, the last N, and the ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.adapters.base import Reading, Recalled, Reply, Sample, TrialContext
from agentbench_kv.adapters.locomo import task as module
from agentbench_kv.adapters.locomo.data import CATEGORIES, load
from agentbench_kv.adapters.locomo.disputed import CITATION, Disputed, all_disputed
from agentbench_kv.adapters.locomo.evidence import recalled_shares, sent_share
from agentbench_kv.adapters.locomo.scoring import find_spec
from agentbench_kv.adapters.locomo.task import LocomoQA, history
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.reports import TurnInfo
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.run.ledger import ledger
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

pytestmark = pytest.mark.skipif(
    find_spec("nltk") is None, reason="nltk absent: pip install 'agentbench-kv[locomo]'"
)
IDS = ["D1:1", "D1:2", "D2:1", "D2:2", "D10:1", "D10:2"]


class Memory:
    """Says `Cairo`, having been shown what a function of the history returns."""

    def __init__(self, recall=lambda _: None):
        self.recall = recall
        self.asked = []

    def chat(self, messages, tools=None, max_tokens=None, stop=()):  # noqa: ARG002
        self.asked.append(list(messages))
        message = {"role": "assistant", "content": "Cairo"}
        return Reply(
            "Cairo", "", [], "stop", False, "Cairo", message, recalled=self.recall(messages)
        )


def play(client, **settings):
    task = LocomoQA.create({"check": "off", **settings})
    task.samples(None, 0)
    return task.run_trial(Sample("talk-1"), TrialContext(0, 7, client, None, "s"))


def parts(outcome, name):
    return outcome.metrics[f"{name}_right"], outcome.metrics[f"{name}_asked"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("context", "last", "read", "sent"),
    [
        # Evidence: D2:1; D10:1; D1:2; D2:1 and D1:1; none.
        ("full", 0, IDS, 4.0),
        ("none", 0, [], 0.0),
        ("turns", 1, ["D10:2"], 0.0),
        ("turns", 4, IDS[2:], 2.5),
        ("turns", 99, IDS, 4.0),
        ("sessions", 1, IDS[4:], 1.0),
        ("sessions", 2, IDS[2:], 2.5),
        ("sessions", 3, IDS, 4.0),
    ],
)
def test_only_the_last_are_read(context, last, read, sent):
    client = Memory()
    outcome = play(client, context=context, last=last)
    talk = load(check=False).conversations["talk-1"]
    texts = [message["content"] for message in client.asked[0][1:-1]]
    assert len(texts) == len(read)
    for id, text in zip(read, texts, strict=True):
        assert talk.utterances[id].text in text
    assert all(text.startswith("[") for text in texts[:1])  # whatever is read first has its date
    assert parts(outcome, "evidence_sent") == (sent, 4)
    assert len(outcome.facts) == sum(id in read for q in talk.questions for id in q.evidence)
    assert "evidence_recall_asked" not in outcome.metrics


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"context": "turns"}, "needs --set last=N"),
        ({"last": 3}, "needs --set context"),
        ({"context": "none", "last": 3}, "needs --set context"),
    ],
)
def test_half_a_setting_is_one_line(settings, said):
    with pytest.raises(UsageError, match=said):
        play(Memory(), **settings)


@pytest.mark.usefixtures("folder")
def test_what_a_memory_recalls_by_message_number():
    spots = history(load(check=False).conversations["talk-1"]).spots
    shown = Recalled((), {spots["D2:1"]: 1.0, spots["D1:1"]: 0.5})
    outcome = play(Memory(lambda _: shown))
    assert parts(outcome, "evidence_recall") == (
        1.75,
        4,
    )  # the first, and the fourth but for half of its second
    assert parts(outcome, "evidence_sent") == (4.0, 4)
    assert (outcome.metrics["recalled_total"], outcome.metrics["recalled_count"]) == (7.5, 5)
    documents = outcome.transcript["answers"]
    assert [each.get("evidence_recalled") for each in documents] == [1.0, 0.0, 0.0, 0.75, None]


@pytest.mark.usefixtures("folder")
def test_what_a_memory_recalls_by_text():
    talk = load(check=False).conversations["talk-1"]
    verbatim = Recalled(tuple(f"(x) {talk.utterances[id].text}\n" for id in ("D1:2", "D10:1")))
    assert parts(play(Memory(lambda _: verbatim)), "evidence_recall") == (2.0, 4)
    # Written anew, its texts are no evidence of anything; nothing at all is nothing.
    anew = play(Memory(lambda _: Recalled(("Ben reads a lot",))))
    assert "evidence_recall_asked" not in anew.metrics
    assert parts(play(Memory(lambda _: Recalled(()))), "evidence_recall") == (0.0, 4)


@pytest.mark.usefixtures("folder")
def test_a_failed_conversation_is_asked_for_the_same_evidence():
    talked = play(Memory(lambda _: Recalled(()))).metrics
    asked = {k: v for k, v in talked.items() if k.startswith("evidence_recall")}
    assert len(asked) >= 2
    task = LocomoQA(check="off")
    failed = task.nothing_recalled(Sample("talk-1"))
    assert failed == asked  # all 0 of what is asked
    assert LocomoQA(check="off", context="none").nothing_recalled(Sample("talk-1")) == {}


@pytest.mark.usefixtures("folder")
def test_one_answer_without_account_leaves_the_column_out():
    class Silent(Memory):
        def chat(self, messages, *rest, **more):
            reply = super().chat(messages, *rest, **more)
            return replace(reply, recalled=None) if len(self.asked) == 3 else reply

    assert "evidence_recall_asked" not in play(Silent(lambda _: Recalled(()))).metrics


@pytest.mark.usefixtures("folder")
def test_recalling_everything_is_seen_beside_the_recall():
    whole = lambda messages: Recalled((), dict.fromkeys(range(len(messages)), 1.0))  # noqa: E731
    everything = play(Memory(whole))
    assert parts(everything, "evidence_recall") == (4.0, 4)
    assert everything.metrics["recalled_total"] == 6 * 5  # every turn, for every question


@given(st.sets(st.sampled_from(IDS)), st.lists(st.sampled_from(IDS), unique=True))
def test_the_share_of_evidence_by_brute_force(before, evidence):
    from agentbench_kv.adapters.locomo.data import Question

    found = sent_share(Question(0, "q", "a", 4, tuple(evidence)), before)
    hits = [id for id in evidence if id in before]
    assert found == (len(hits) / len(evidence) if evidence else None)
    assert recalled_shares(None, {}, {}) is None


@pytest.mark.usefixtures("folder")
def test_disputed_questions_are_left_out_beside(monkeypatch):
    listed = {0: Disputed("speaker", "why"), 2: Disputed(CITATION, "why")}
    assert "f1_undisputed_asked" not in play(Memory()).metrics  # of another file nothing is known
    monkeypatch.setattr(LocomoQA, "_disputed", lambda *_: listed)
    outcome = play(Memory())
    f1 = [each["f1"] for each in outcome.transcript["answers"]]
    assert parts(outcome, "f1") == (pytest.approx(sum(f1)), 5)
    # The answer of the second stands: only what is named as its evidence is disputed.
    assert parts(outcome, "f1_undisputed") == (pytest.approx(sum(f1[1:])), 4)
    assert parts(outcome, "evidence_sent") == (4.0, 4)
    assert parts(outcome, "evidence_sent_undisputed") == (2.0, 2)
    kinds = [each.get("disputed") for each in outcome.transcript["answers"]]
    assert kinds == ["speaker", "citation", None, None, None]


def test_the_list_of_disputed_questions(published):
    listed = all_disputed()
    questions = {
        (talk.id, q.index): q for talk in published.conversations.values() for q in talk.questions
    }
    rows = {(talk, index): each for talk, found in listed.items() for index, each in found.items()}
    assert rows.keys() <= questions.keys()
    assert len(rows) == 156
    answers = [questions[key].category for key, each in rows.items() if each.answer]
    assert [answers.count(category) for category in CATEGORIES] == [28, 26, 9, 36]


def test_no_text_of_the_data_is_in_the_list(published):
    """The data may not be copied: no run of five words of it stands among our reasons."""
    runs = set()
    for talk in published.conversations.values():
        texts = [each.text for each in talk.utterances.values()]
        texts += [text for q in talk.questions for text in (q.text, q.answer)]
        for text in texts:
            words = text.casefold().split()
            runs |= {tuple(words[i : i + 5]) for i in range(len(words) - 4)}
    for found in all_disputed().values():
        for each in found.values():
            words = each.reason.casefold().split()
            assert not runs & {tuple(words[i : i + 5]) for i in range(len(words) - 4)}, each.reason


def test_speakers_of_disputed_evidence_are_others(published):
    """Recomputed: where the list says so, the evidence is not said by the person asked about."""
    wrong = total = 0
    for talk in published.conversations.values():
        for index, each in all_disputed().get(talk.id, {}).items():
            if each.kind != "speaker":
                continue
            (question,) = [q for q in talk.questions if q.index == index]
            named = [name for name in talk.speakers if name in question.text]
            total += 1
            wrong += {talk.utterances[id].speaker for id in question.evidence}.isdisjoint(named[:1])
    assert (wrong, total) == (21, 24)


def test_categories_are_what_the_numbers_say(published):
    """Multi-hop evidence lies in several sessions, single-hop evidence in one; dates are asked."""
    asked = [q for talk in published.conversations.values() for q in talk.questions]

    def part(category, holds):
        of_it = [q for q in asked if q.category == category]
        return sum(map(holds, of_it)) / len(of_it)

    def spread(q):
        return len({id.partition(":")[0] for id in q.evidence}) > 1

    assert part(1, spread) > 0.9 > 0.01 > part(4, spread)
    assert part(2, lambda q: q.text.startswith("When")) > 0.7
    assert part(3, lambda q: q.text.startswith("When")) == 0


def turn(number, prefill, output, ttft=None, tpot=None):
    return TurnInfo(
        turn=number, prompt_tokens=prefill, output_tokens=output, cached_tokens=0, live_before=0,
        live_after=0, prefill_tokens=prefill, ttft_ms=ttft, tpot_ms=tpot, finish_reason="stop",
        reset=False,
    )  # fmt: skip


def test_the_ledger_parts_reading_from_answering():
    turns = [turn(0, 900, 5, 2000.0, 10.0), turn(1, 20, 1, 30.0), turn(2, 30, 11, 50.0, 10.0)]
    assert ledger(None, turns) == {}
    found = ledger(Reading(turns=1), turns)
    assert found == {
        "ingest_calls": 0, "ingest_tokens": 900, "ingest_s": 2.0,
        "answer_calls": 3, "answer_tokens": 20 + 30 + 17,
        "answer_s": pytest.approx(0.03 + 0.05 + 0.04 + 0.1),
    }  # fmt: skip
    total = sum(each.prefill_tokens + each.output_tokens for each in turns)
    assert found["ingest_tokens"] + found["answer_tokens"] == total
    memory = ledger(Reading(calls=7, tokens=5000, seconds=3.5), turns)
    assert (memory["ingest_calls"], memory["ingest_tokens"]) == (7, 5000)
    assert (memory["ingest_s"], memory["answer_tokens"]) == (3.5, 950 + 17)
    untimed = ledger(Reading(turns=1), turns, timed=False)
    assert untimed["ingest_s"] is untimed["answer_s"] is None
    assert ledger(Reading(turns=1), [turn(0, 9, 5)])["answer_s"] is None


@pytest.mark.usefixtures("folder")
def test_records_have_the_ledger_and_floors_have_no_reading(tmp_path):
    for settings in ({"check": "off"}, {"check": "off", "context": "none"}):
        spec = resolve(RunSpec("scripted", "gold", "full", None, "locomo/qa", limit=1), settings)
        run_one(spec, tmp_path, lambda *_: None)
        run = RunReader(tmp_path / spec.id)
        (record,) = run.trials()
        turns = run.turns()
        if "context" in settings:
            assert "ingest_tokens" not in record.metrics
            continue
        assert record.metrics["ingest_tokens"] == turns[0].prefill_tokens
        assert record.metrics["answer_calls"] == len(turns) == 5


@pytest.mark.usefixtures("folder")
def test_defaults_leave_no_trace_in_a_run():
    spec = resolve(RunSpec("scripted", "gold", "full", None, "locomo/qa"), {"check": "off"})
    assert not {"adversarial", "context", "last"} & spec.task_params.keys()
    assert module.CORRUPT
