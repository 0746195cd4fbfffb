"""The task: samples, prompts, known agents through the gateway, and trials that end early."""

from dataclasses import replace

import pytest

from agentbench_kv.adapters.base import Reply, Sample, TrialContext
from agentbench_kv.adapters.locomo.scoring import find_spec
from agentbench_kv.adapters.locomo.task import CORRUPT, LocomoQA, ask, facts, history
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec

pytestmark = pytest.mark.skipif(
    find_spec("nltk") is None, reason="nltk absent: pip install 'agentbench-kv[locomo]'"
)
AGENTS = {"gold": 1.0, "corrupt": 0.0, "null": 0.0}  # of the made file; see ABSENT
QUESTIONS = ["q-0", "q-2", "q-3", "q-4", "q-5"]


class Client:
    """Says what it is told; a finish reason in place of a text ends the context."""

    def __init__(self, *says):
        self.says = list(says)
        self.asked = []

    def chat(self, messages, tools=None, max_tokens=None, stop=()):  # noqa: ARG002
        self.asked.append(list(messages))
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        reason = "context_limit" if said is None else "stop"
        text = said or ""
        message = {"role": "assistant", "content": text}
        return Reply(text, "", [], reason, False, text, message)


def task(**settings):
    return LocomoQA.create({"check": "off", **settings})


def play(name, *says, **settings):
    client = Client(*says)
    context = TrialContext(0, 7, client, None, "s")
    return task(**settings).run_trial(Sample(name), context), client


@pytest.mark.usefixtures("folder")
def test_samples_are_conversations_or_questions():
    talks = task().samples(None, 0)
    assert [(s.id, s.cluster) for s in talks] == [("talk-1", "talk-1"), ("talk-2", "talk-2")]
    single = task(ingest="question").samples(None, 5)
    wanted = [(f"{talk}/{q}", talk) for talk in ("talk-1", "talk-2") for q in QUESTIONS]
    assert [(s.id, s.cluster) for s in single] == wanted
    assert task(ingest="question").samples(3, 0) == single[:3]


@pytest.mark.usefixtures("folder")
def test_the_agent_reads_turn_by_turn_under_the_dates():
    outcome, client = play("talk-1/q-0", "Cairo", ingest="question")
    (messages,) = client.asked
    assert [m["role"] for m in messages] == ["system"] + ["user"] * 7
    assert messages[1]["content"] == (
        "[1:56 pm on 1 May, 2023]\nAda: I was in Lima — lovely! [image: a grey harbour]"
    )
    assert messages[2]["content"] == "Ben: And I read 1 books at home."
    assert messages[-1]["content"].startswith("Question: Where was Ada in session 2?")
    assert outcome.score == 1.0


@pytest.mark.usefixtures("folder")
def test_one_session_holds_all_questions_and_only_grows():
    outcome, client = play("talk-1", "Cairo", "Bergen", "1", "Cairo", "likely")
    for before, after in zip(client.asked, client.asked[1:], strict=False):
        assert after[: len(before)] == before
        assert [m["role"] for m in after[len(before) :]] == ["assistant", "user"]
    f1 = [1.0, 0.0, 1.0, 2 / 3, 2 / 7]
    answers = outcome.transcript["answers"]
    assert [each["f1"] for each in answers] == pytest.approx(f1)
    assert [each["index"] for each in answers] == [0, 2, 3, 4, 5]
    assert outcome.score == pytest.approx(sum(f1) / 5)
    assert outcome.metrics["cat4_single_hop_right"] == 1.0
    assert outcome.metrics["cat4_single_hop_asked"] == 2
    assert outcome.metrics["f1"] == pytest.approx(outcome.score)
    assert outcome.metrics["f1_right"] == pytest.approx(sum(f1))
    assert outcome.metrics["similarity"] == outcome.metrics["bertscore"] == "n/a"
    assert "similarity_asked" not in outcome.metrics


@pytest.mark.usefixtures("folder")
def test_a_full_context_is_no_score_but_keeps_what_was_answered():
    outcome, _ = play("talk-1", "Cairo", None)
    assert outcome.status is TrialStatus.CONTEXT_LIMIT
    assert outcome.score is None
    assert "after 1 of 5 questions" in outcome.error
    assert (outcome.metrics["f1_right"], outcome.metrics["f1_asked"]) == (1.0, 5)
    alone, _ = play("talk-1/q-0", None, ingest="question")
    assert alone.status is TrialStatus.CONTEXT_LIMIT
    assert alone.metrics["f1"] == "n/a"


@pytest.mark.usefixtures("folder")
def test_a_trial_out_of_time_keeps_its_answers():
    outcome, _ = play("talk-1", "Cairo", TimeoutError("time is up"))
    assert outcome.status is TrialStatus.TIMEOUT
    assert [each["answer"] for each in outcome.transcript["answers"]] == ["Cairo"]


@pytest.mark.usefixtures("folder")
def test_evidence_is_text_of_the_session_in_single_tokens():
    talk = task()._data.conversations["talk-1"]
    by_index = {each.index: each for each in talk.questions}
    text = "\n".join(message["content"] for message in history(talk).messages)
    found = facts(talk, by_index[4], 0.4, talk.utterances)
    assert len(found) == 2
    for fact in found:
        assert fact.text.isascii()
        assert fact.text in text
        assert not fact.right
    assert "?" in ask(by_index[4])["content"]


@pytest.mark.usefixtures("folder")
def test_bad_settings_are_one_line():
    with pytest.raises(UsageError, match="ingest=both: expected one of conversation, question"):
        task(ingest="both")
    with pytest.raises(UsageError, match="did you mean 'ingest'"):
        task(ingst="question")
    with pytest.raises(PrerequisiteError, match="not the published file"):
        task(check="on").samples(None, 0)
    with pytest.raises(PrerequisiteError, match="similarity_model"):
        task(similarity_model="/nowhere").samples(None, 0)


def spec(model, ingest, **more):
    settings = LocomoQA.create({"ingest": ingest, "check": "off"}).settings()
    return RunSpec(
        engine="scripted",
        model=model,
        method="full",
        budget=None,
        task="locomo/qa",
        task_params=settings,
        concurrency=2,
        **more,
    )


def run(spec, out):
    summary = run_one(spec, out, lambda *_: None)
    return summary, RunReader(out / spec.id)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("ingest", ["conversation", "question"])
@pytest.mark.parametrize("agent", sorted(AGENTS))
def test_known_agents_score_what_they_must(agent, ingest, tmp_path):
    summary, _ = run(spec(agent, ingest), tmp_path / "runs")
    assert summary.score.point == AGENTS[agent]
    assert summary.sub_scores["f1"].asked == 10
    assert summary.sub_scores["f1"].right == 10 * AGENTS[agent]
    assert not summary.failures


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("ingest", "requests"), [("conversation", 5), ("question", 1)])
def test_a_session_is_prefilled_once_and_every_question_is_a_turn(ingest, requests, tmp_path):
    _, directory = run(spec("gold", ingest, limit=1), tmp_path / "runs")
    (record,) = directory.trials()
    turns = directory.turns()
    assert record.session_resets == 0
    assert record.usage.requests == len(turns) == requests
    assert record.cluster == "talk-1"
    assert record.kv.prefill_tokens == sum(turn.prefill_tokens for turn in turns)
    assert all(turn.prefill_tokens < turns[0].prefill_tokens / 4 for turn in turns[1:])


def test_no_gold_answer_holds_the_corrupt_word(published):
    answers = [q.answer for talk in published.conversations.values() for q in talk.questions]
    assert not any(CORRUPT in answer.lower() for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["gold", "corrupt"])
def test_known_agents_on_the_published_file(agent, published, tmp_path):
    whole = spec(agent, "conversation")
    whole = replace(whole, task_params={**whole.task_params, "check": "on"})
    summary, directory = run(whole, tmp_path / "runs")
    questions = sum(len(each.questions) for each in published.conversations.values())
    assert summary.sub_scores["f1"].asked == questions
    assert summary.sub_scores["f1"].right == questions * AGENTS[agent]
    assert all(record.score == AGENTS[agent] for record in directory.trials())
