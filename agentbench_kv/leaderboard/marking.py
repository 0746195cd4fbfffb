"""Marking recorded answers again: what a score is made of where no token can be played again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentbench_kv.adapters.base import MarkedAnswers, Sample, Task
from agentbench_kv.leaderboard.evidence import CUT_OFF, Checks, Fault, RunEvidence, differs, place
from agentbench_kv.leaderboard.replay import alike
from agentbench_kv.results.records import Metric, TrialRecord, TrialStatus
from agentbench_kv.results.run_reader import TrialKey

# All that a trial of a task whose answers are marked may have beside what they give. No answer
# tells it, so it is as it was reported.
AS_REPORTED = frozenset({
    # the account of reading and answering, and what an endpoint charged
    *("ingest_calls", "ingest_tokens", "ingest_s", "ingest_failed", "ingest_files"),
    *("ingest_files_s", "append_tokens", "append_s", "answer_calls", "answer_tokens", "answer_s"),
    *("answer_prefill_tokens_total", "answer_prefill_tokens_count"),
    *("answer_live_tokens_total", "answer_live_tokens_count"),
    *("answer_ttft_ms_total", "answer_ttft_ms_count", "cost"),
    # how the engine asked, and calls that its parser did not read
    *("asked_in", "calls_in_other_syntax", "other_syntax"),
    # what an encoder found alike, where the run names one
    *("similarity", "similarity_right", "similarity_asked"),
    *("bertscore", "bertscore_right", "bertscore_asked"),
})  # fmt: skip
# And of a run with a memory, what this brought back.
OF_A_MEMORY = frozenset({
    *("recalled_total", "recalled_count", "recalled_texts"),
    *("best_layer_evidence_right", "best_layer_evidence_asked"),
    *("best_layer_message_right", "best_layer_message_asked"),
})  # fmt: skip


def check_marks(evidence: RunEvidence, task: Task, samples: Mapping[str, Sample]) -> Checks:
    """Compare scores and their parts with what the transcripts' own answers say, if they do.

    Without transcripts a score still has to be what its parts come to.
    """
    for key, record in evidence.trials.items():
        sample = samples[key[0]]
        if key not in evidence.transcripts:
            yield from _check_sums(key, record, task, sample)
            continue
        said = evidence.transcripts[key].transcript
        marked = task.mark(sample, said)
        if marked is None:
            continue
        if record.status not in CUT_OFF and not alike(record.score, marked.score):
            yield differs(place(key, "score"), record.score, marked.score)
        yield from _check_metrics(evidence, key, _expected(evidence, task, record, sample, marked))
        for name, one, other in _apart(said, marked.transcript, "transcript: transcript"):
            if not alike(one, other):
                yield differs(place(key, name), one, other)
        # A history that was written anew need not hold what the task sent.
        if not (evidence.rewrites or record.session_resets):
            for name in marked.missing:
                text = "is missing, and the session has it"
                yield Fault(place(key, f"transcript: transcript.{name}"), text)


def _expected(
    evidence: RunEvidence, task: Task, record: TrialRecord, sample: Sample, marked: MarkedAnswers
) -> dict[str, Metric | None]:
    """Return the metrics that follow from a trial's answers, and from how it ended."""
    recalled = task.nothing_recalled(sample)
    if record.status is TrialStatus.SCORED:
        found = dict(marked.metrics)
    else:
        # Whoever had answered everything as the time was up has nothing right.
        late = marked.score is not None
        found = dict(task.nothing_right(sample) if late else marked.metrics)
        # Records may be older than what a memory brought back in failed trials.
        if evidence.keeps_banks:
            unheard = {n for n in recalled if found.get(n) is None and n in record.metrics}
            found |= {name: recalled[name] for name in unheard}
    return found if evidence.keeps_banks else found | dict.fromkeys(recalled)


def _check_metrics(
    evidence: RunEvidence, key: TrialKey, expected: Mapping[str, Metric | None]
) -> Checks:
    """Check a trial's metrics: each that its answers give, and of the others none but the known."""
    said = evidence.trials[key].metrics
    for name, value in expected.items():
        if not alike(said.get(name), value):
            yield differs(place(key, f"metrics.{name}"), said.get(name), value)
    known = AS_REPORTED | (OF_A_MEMORY if evidence.keeps_banks else frozenset())
    for name in sorted(said.keys() - expected.keys() - known):
        yield Fault(place(key, f"metrics.{name}"), "is nothing that the answers give")


def _check_sums(key: TrialKey, record: TrialRecord, task: Task, sample: Sample) -> Checks:
    """Check a trial without its answers: what was asked, and the score that its parts come to."""
    derived = task.score_of(sample, record.metrics)
    if derived is None:
        return
    if record.status is TrialStatus.SCORED:
        if not alike(record.score, derived):
            yield differs(place(key, "score"), record.score, derived)
    elif derived >= 1:
        text = f"is {record.status.value}, and everything is right"
        yield Fault(place(key, "status"), text)
    for name, asked in task.nothing_right(sample).items():
        if name.endswith("_asked") and not alike(record.metrics.get(name), asked):
            yield differs(place(key, f"metrics.{name}"), record.metrics.get(name), asked)


def _apart(said: Any, derived: Any, field: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield where a document has not what was derived of it; it may have more."""
    if isinstance(derived, Mapping) and isinstance(said, Mapping):
        for name, value in derived.items():
            yield from _apart(said.get(name), value, f"{field}.{name}")
    elif isinstance(derived, list) and isinstance(said, list) and len(said) == len(derived):
        for number, (one, other) in enumerate(zip(said, derived, strict=True)):
            yield from _apart(one, other, f"{field}[{number}]")
    elif not alike(said, derived):
        yield field, said, derived
