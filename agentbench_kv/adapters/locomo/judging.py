"""LoCoMo's answers before an LLM judge: two criteria, and what each of them lets pass.

Most published figures are such a judge's, and most of those are generous. So the judge is also
asked about answers that are known to be wrong, made by rule from the questions themselves: what
share of these it accepts stands beside what it accepts of a run. A judge never changes a score.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.browser.judge import Judge, JudgeVerdict, verdicts_file
from agentbench_kv.adapters.locomo.disputed import CITATION
from agentbench_kv.adapters.locomo.scoring import f1, normalised
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.stats import Interval, Scores, level

TASKS = ("locomo/qa", "probe/locomo")
_FORM = """\

Question: {question}

Reference answer: {gold}

Answer to be marked, as a JSON text: {response}

End with one line: "Verdict: correct" or "Verdict: wrong".
"""
CRITERIA = {
    # What Mem0's evaluation asks for, in our words.
    "generous": """\
You mark answers to questions about things that two people told each other. The reference answer is
short; the answer may be much longer. Mark generously: an answer that is about the same thing as the
reference counts as correct. Of questions about time, another form of the date, or a relative time
that comes to the same date or period, counts as correct too.
""",
    "strict": """\
You mark answers to questions about things that two people told each other. An answer is correct
only if it states what the reference answer states: every item of a list, the same person, place and
thing, and a time that is the same at the reference's own precision. Other wording is fine, and so
is more detail that contradicts nothing. An answer that only names the topic, that is vague where
the reference is definite, that offers several alternatives, or that says the matter is unknown, is
wrong.
""",
}
# Answers made by rule; all of them are wrong.
VAGUE_WRONG, TOPIC, SWAPPED = "vague and wrong", "topic alone", "another answer"
_LITTLE_WORDS = """
    what when where which who whom whose why how many much long did does do is are was were has have
    had would could can will in on at of to for with from by about and or that this his her their
    its he she it they some any kind type
"""
_LITTLE = frozenset(_LITTLE_WORDS.split())


@dataclass(frozen=True)
class Marked:
    """An answer that a judge is asked about."""

    agent: str  # empty for the run's own, or the name of a rule
    conversation: str
    sample: str
    trial: int
    index: int  # of the question in the file
    category: str
    disputed: bool  # whether its gold answer is
    question: str
    gold: str
    response: str

    @property
    def key(self) -> str:
        said = hashlib.sha256(self.response.encode("utf-8", "replace")).hexdigest()[:16]
        return f"{self.agent}|{self.sample}|{self.trial}|{self.index}|{said}"


@dataclass(frozen=True)
class Accepted:
    """The share of some answers that a judge accepts under a criterion."""

    criterion: str
    what: str  # `all`, `undisputed`, a category, or the name of a rule
    interval: Interval | None  # conversations are the units; None while verdicts are missing
    answers: int
    missing: int  # verdicts

    def document(self) -> dict[str, Any]:
        """Return it for a file or as JSON."""
        found = self.interval
        return {
            "criterion": self.criterion,
            "what": self.what,
            "answers": self.answers,
            "missing": self.missing,
            "share": found.point if found else None,
            "low": found.low if found else None,
            "high": found.high if found else None,
        }


@dataclass(frozen=True)
class JudgedAnswers:
    """The result of judging a run."""

    path: Path  # the file with every verdict
    accepted: tuple[Accepted, ...]
    asked: int  # answers that the judge was asked about just now
    missing: int  # verdicts that could not be had
    errors: tuple[str, ...]  # why, each reason once


def wrong_answers(asked: Sequence[Marked], answers: Sequence[Marked]) -> Iterator[Marked]:
    """Yield wrong answers to what is asked of some answered questions, as rules make them.

    The wrong content is the gold answer of another question of the same conversation and category
    that shares no word with the right one; a question without such another is left out.
    """
    for each in asked:
        topic = _topic(each)
        rivals = [
            other.gold
            for other in answers
            if (other.conversation, other.category) == (each.conversation, each.category)
            and not f1(other.gold, each.gold)
        ]
        if not rivals or not topic:
            continue
        wrong = random.Random(f"{each.conversation}/{each.index}").choice(sorted(set(rivals)))
        vague = f"Something to do with {topic}: {wrong}, or so."
        texts = {VAGUE_WRONG: vague, TOPIC: f"Something to do with {topic}.", SWAPPED: wrong}
        for agent, text in texts.items():
            yield replace(each, agent=agent, response=text)


def judge_answers(
    run: Path,
    judge: Judge,
    *,
    controls: int = 20,
    concurrency: int = 8,
    report: Callable[[int], None] | None = None,
) -> JudgedAnswers:
    """Ask a judge about every answer of a run, and about wrong ones to `controls` questions.

    Those are as many of each conversation, or all if it has fewer, the same at every call. What
    was judged before is not asked again. Questions that were never answered count as wrong. A
    UsageError if the run is none of LoCoMo, or has no answers.
    """
    reader = RunReader(run)
    about = {"judge": judge.provenance() | {"prompt_sha256": _prompts_sha()}}
    answers, unanswered = _answers(reader)
    if not answers:
        raise UsageError(f"{run} holds no answers of categories 1 to 4 to judge")
    path = run / verdicts_file("judge-locomo", judge.model, about)
    known: dict[str, dict[str, Any]] = _known(path)
    asked_about = [*answers, *wrong_answers(_chosen(answers, controls), answers)]
    todo = [
        (criterion, each)
        for criterion in CRITERIA
        for each in asked_about
        if f"{criterion}|{each.key}" not in known
    ]
    with ThreadPoolExecutor(concurrency) as pool:
        found = pool.map(partial(_verdict, judge), todo)
        for count, ((criterion, each), verdict) in enumerate(zip(todo, found, strict=True), 1):
            known[f"{criterion}|{each.key}"] = _row(criterion, each, verdict)
            if report:
                report(count)
    rows = [known[f"{criterion}|{each.key}"] for criterion in CRITERIA for each in asked_about]
    accepted = tuple(_accepted(rows, unanswered))
    document = {
        **about,
        "criteria": CRITERIA,
        "note": "A judge's verdicts; the score of the run is F1 and stays as it is.",
        "accepted": [each.document() for each in accepted],
        "verdicts": rows,
    }
    write_atomic(path, json_bytes(document, indent=1))
    lost = [row for row in rows if row["accepted"] is None]
    errors = sorted({str(row["error"]) for row in lost})
    return JudgedAnswers(path, accepted, len(todo), len(lost), tuple(errors))


def _answers(reader: RunReader) -> tuple[list[Marked], dict[str, int]]:
    """Return a run's answers, and how many questions of each conversation have none."""
    task = reader.info.spec.get("task")
    if task not in TASKS:
        raise UsageError(f"{reader.path} is a run of {task}, not of {' or '.join(TASKS)}")
    found: list[Marked] = []
    left: dict[str, int] = {}
    for record in reader.trials():
        if not record.finished:
            continue
        document = (reader.transcript(record) or {}).get("transcript") or {}
        given = document.get("answers", ()) if isinstance(document, dict) else ()
        own = [each for each in given if str(each["category"]) != "cat5_adversarial"]
        talk = record.cluster or record.sample_id
        asked = record.metrics.get("f1_asked", len(own))
        missing = int(asked) - len(own) if isinstance(asked, int | float) else 0
        left[talk] = left.get(talk, 0) + max(missing, 0)
        for each in own:
            about = (talk, record.sample_id, record.trial, each["index"], each["category"])
            disputed = each.get("disputed", CITATION) != CITATION
            texts = (each["question"], each["gold"], each["answer"])
            found.append(Marked("", *about, disputed, *texts))
    return found, left


def _chosen(answers: Sequence[Marked], count: int) -> list[Marked]:
    """Return questions to which wrong answers are made, of every conversation the same number."""
    chosen: list[Marked] = []
    for talk in dict.fromkeys(each.conversation for each in answers):
        first = {each.index: each for each in reversed(answers) if each.conversation == talk}
        indices = sorted(first)
        picked = random.Random(talk).sample(indices, min(count, len(indices)))
        chosen += [first[index] for index in sorted(picked)]
    return chosen


def _topic(answer: Marked) -> str:
    """Return the words of a question that say what it is about, without any of the gold answer."""
    gold = set(normalised(answer.gold).split())
    words = normalised(answer.question).split()
    return " ".join(word for word in words if word not in _LITTLE and word not in gold)


def _verdict(judge: Judge, asked: tuple[str, Marked]) -> JudgeVerdict:
    criterion, each = asked
    quoted = json.dumps(each.response, ensure_ascii=False)  # it cannot pose as the prompt's end
    put = replace(judge, prompt=CRITERIA[criterion] + _FORM)
    return put.verdict(each.question, each.gold, quoted)


def _row(criterion: str, each: Marked, verdict: JudgeVerdict) -> dict[str, Any]:
    return {
        "key": f"{criterion}|{each.key}",
        "criterion": criterion,
        "agent": each.agent,
        "conversation": each.conversation,
        "sample_id": each.sample,
        "trial": each.trial,
        "index": each.index,
        "category": each.category,
        "disputed": each.disputed,
        "accepted": verdict.correct,
        "error": verdict.error,
        "reply": verdict.reply,
    }


def _known(path: Path) -> dict[str, dict[str, Any]]:
    """Return earlier verdicts; failed ones are asked again."""
    rows = json.loads(path.read_bytes())["verdicts"] if path.is_file() else []
    return {row["key"]: row for row in rows if row["accepted"] is not None}


def _accepted(
    rows: Sequence[Mapping[str, Any]], unanswered: Mapping[str, int]
) -> Iterator[Accepted]:
    """Yield the shares of a run's answers, and of wrong ones."""
    for criterion in CRITERIA:
        of_it = [row for row in rows if row["criterion"] == criterion]
        own = [row for row in of_it if not row["agent"]]
        yield from _share(criterion, "all", own, unanswered)
        sound = [row for row in own if not row["disputed"]]
        if len(sound) < len(own):
            yield from _share(criterion, "undisputed", sound)
        for category in sorted({str(row["category"]) for row in own}):
            yield from _share(criterion, category, [r for r in own if r["category"] == category])
        for agent in (VAGUE_WRONG, TOPIC, SWAPPED):
            yield from _share(criterion, agent, [row for row in of_it if row["agent"] == agent])


def _share(
    criterion: str,
    what: str,
    rows: Iterable[Mapping[str, Any]],
    unanswered: Mapping[str, int] | None = None,
) -> Iterator[Accepted]:
    counts: dict[str, tuple[float, float]] = {}
    groups: dict[str, str] = {}
    missing = 0
    for row in rows:
        name = f"{row['conversation']}/{row['index']}"
        right, asked = counts.get(name, (0.0, 0.0))
        counts[name] = right + (row["accepted"] or 0), asked + 1
        groups[name] = row["conversation"]
        missing += row["accepted"] is None
    for talk, count in (unanswered or {}).items():
        for number in range(count):
            counts[f"{talk}/unanswered-{number}"] = 0.0, 1.0
            groups[f"{talk}/unanswered-{number}"] = talk
    scores = Scores.of_counts(counts, groups)
    if scores.parts:
        answers = int(sum(asked for _, asked in scores.parts.values()))
        yield Accepted(criterion, what, None if missing else level(scores), answers, missing)


def _prompts_sha() -> str:
    return hashlib.sha256(json.dumps([CRITERIA, _FORM]).encode()).hexdigest()
