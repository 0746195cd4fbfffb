"""The fifth category: in figures of its own, and no constant answer gains by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.adapters.base import Reply, TrialContext
from agentbench_kv.adapters.locomo.abstention import abstains, resists
from agentbench_kv.adapters.locomo.data import ABSENT
from agentbench_kv.adapters.locomo.scoring import f1, f1_authors, find_spec
from agentbench_kv.adapters.locomo.task import LocomoQA
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialStatus

pytestmark = pytest.mark.skipif(
    find_spec("nltk") is None, reason="nltk absent: pip install 'agentbench-kv[locomo]'"
)


class Says:
    """Answers by a function of the question; None where the context is full."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def chat(self, messages, tools=None, max_tokens=None, stop=()):  # noqa: ARG002
        question = messages[-1]["content"].removeprefix("Question: ").splitlines()[0]
        self.asked.append(list(messages))
        text = self.answer(question)
        reason = "context_limit" if text is None else "stop"
        message = {"role": "assistant", "content": text or ""}
        return Reply(text or "", "", [], reason, False, text or "", message)


def play(answer, **settings):
    client = Says(answer)
    task = LocomoQA.create({"check": "off", **settings})
    (sample, *_) = task.samples(None, 0)
    return task.run_trial(sample, TrialContext(0, 7, client, None, "s")), client


def share(outcome, name):
    return outcome.metrics[f"{name}_right"] / outcome.metrics[f"{name}_asked"]


@pytest.mark.parametrize(
    "answer",
    [
        ABSENT,
        "not mentioned",
        "The conversation doesn't say.",
        "It is never stated where he was",
        "No information available",
        "There is no mention of that.",
        "unknown",
        "I don\u2019t know.",
        "This cannot be determined from the conversation",
        "Ada said nothing about it",
        "There isn't enough information",
        "N/A",
        "No specific details are given.",
        "It isn't clear from what they say",
        "It was not explicitly mentioned.",
        "The text does not provide information about that",
        "Unknown",
    ],
)
def test_what_abstains(answer):
    assert abstains(answer)
    assert resists(answer, "Where was Ben?", "Oslo")
    assert not resists(f"{answer} Oslo", "Where was Ben?", "Oslo")  # a bet on both


@pytest.mark.parametrize(
    "answer",
    [
        "", "Oslo", "Nothing Else Matters", "no", "He is not happy", "I would rather not.",
        "She says it was known", "an unknown soldier's grave, not far",
        "None of them left",
        " ".join(["word"] * 40) + " not mentioned",
    ],
)  # fmt: skip
def test_what_does_not_abstain(answer):
    assert not abstains(answer)


def test_words_of_the_question_are_no_trap():
    question = "Why did Ben choose the adoption agency?"
    assert resists("Ben and an adoption agency are not mentioned", question, "adoption agency")
    assert not resists("Not mentioned; because it is kind", question, "because it is kind")
    assert resists("Not mentioned", question, "Not mentioned")  # two traps of the file are this
    assert resists("No, it was not hers.", "Is it hers?", "Yes", right="No")
    assert not resists("Yes", "Is it hers?", "Yes", right="No")


@given(st.text(), st.text(), st.text())
def test_any_text_is_judged(answer, question, trap):
    assert resists(answer, question, trap) in (True, False)
    if answer.strip() == "":
        assert not abstains(answer)


@pytest.mark.usefixtures("folder")
def test_they_come_last_and_change_no_answer_before_them():
    apart, client = play(lambda _: "Cairo", adversarial="apart")
    off, plain = play(lambda _: "Cairo")
    assert len(client.asked) == len(plain.asked) + 1
    assert "Where was Ben?" in client.asked[-1][-1]["content"]
    assert apart.score == off.score
    shared = {k: v for k, v in apart.metrics.items() if k in off.metrics and k not in COUNTS}
    assert shared == {k: v for k, v in off.metrics.items() if k not in COUNTS}
    assert (apart.metrics["adversarial_right"], apart.metrics["adversarial_asked"]) == (0, 1)
    assert apart.metrics["adversarial_null_right"] == 1
    assert "adversarial_asked" not in off.metrics


COUNTS = {"questions", "answered"}


@pytest.mark.usefixtures("folder")
def test_the_way_out_is_offered_only_where_it_is_needed():
    _, apart = play(lambda _: "x", adversarial="apart")
    _, off = play(lambda _: "x")
    assert apart.asked[0][0]["content"].endswith(ABSENT)
    assert ABSENT not in off.asked[0][0]["content"]


@pytest.mark.usefixtures("folder")
def test_alone_they_are_the_score():
    outcome, client = play(lambda _: ABSENT, adversarial="only", ingest="question")
    assert outcome.score == 1.0
    assert len(client.asked) == 1
    assert "f1_asked" not in outcome.metrics
    assert play(lambda _: "Oslo", adversarial="only")[0].score == 0.0
    task = LocomoQA.create({"check": "off", "adversarial": "only", "ingest": "question"})
    assert [each.id for each in task.samples(None, 0)] == ["talk-1/q-1", "talk-2/q-1"]


@pytest.mark.usefixtures("folder")
def test_a_question_that_is_a_sample_needs_a_score():
    with pytest.raises(UsageError, match="adversarial=only asks them"):
        play(lambda _: "x", adversarial="apart", ingest="question")


@pytest.mark.usefixtures("folder")
def test_a_context_that_is_full_after_the_scored_questions_keeps_the_score():
    full = play(lambda q: None if "Ben?" in q else "Cairo", adversarial="apart")[0]
    assert full.status is TrialStatus.SCORED
    assert share(full, "adversarial") == 0.0
    alone = play(lambda _: None, adversarial="only")[0]
    assert alone.status is TrialStatus.CONTEXT_LIMIT


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("constant", [ABSENT, "Oslo", "Cairo", "", "Yes", "x; not mentioned"])
def test_no_constant_answer_is_right_of_both_kinds(constant):
    outcome, _ = play(lambda _: constant, adversarial="apart")
    assert share(outcome, "adversarial") + share(outcome, "attempted") <= 1.0


@pytest.mark.usefixtures("folder")
def test_who_knows_what_was_said_is_right_of_both_kinds():
    outcome, _ = play(lambda q: ABSENT if q == "Where was Ben?" else "Cairo", adversarial="apart")
    assert share(outcome, "adversarial") == share(outcome, "attempted") == 1.0


def test_attacks_on_the_published_file(published):
    """Constants and copies, on every question; their figures are in docs/locomo.md."""
    talks = published.conversations.values()
    plain = [(q, talk) for talk in talks for q in talk.questions]
    trick = [q for talk in talks for q in talk.adversarial]
    assert len(trick) == 446
    assert all(not abstains(q.answer) for q, _ in plain)
    assert sum(resists(ABSENT, q.text, q.trap) for q in trick) == 446
    assert sum(resists(q.trap, q.text, q.trap) for q in trick) == 2  # they say so themselves

    def mean(answer):
        pairs = [(answer(q, talk), q) for q, talk in plain]
        theirs = [f1_authors(said, q.answer, q.category) for said, q in pairs]
        return sum(f1(said, q.answer) for said, q in pairs) / 1540, sum(theirs) / 1540

    assert mean(lambda *_: ABSENT)[0] == pytest.approx(0.031, abs=0.001)
    assert mean(lambda q, _: q.text) == pytest.approx((0.042, 0.038), abs=0.001)
    assert mean(lambda _, talk: " and ".join(talk.speakers))[0] == pytest.approx(0.042, abs=0.001)
    # Little words are in many answers: Mem0's F1 pays them, the authors' half of them not.
    little = mean(lambda *_: "the a of and to in")
    assert little == pytest.approx((0.095, 0.033), abs=0.001)
