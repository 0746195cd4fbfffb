"""Recorded sessions as load: messages of a file, or the sessions of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from agentbench_kv.errors import UsageError
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.run.recordings import RecordedRun, Recording, record_file
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.serving_bench import jobs
from agentbench_kv.serving_bench.measurements import TraceFigures
from agentbench_kv.serving_bench.trace import LoadTrace, ReadMessages

_OF_RUN = "run: its prompts, to the token; timed answers are the server's own, as long as its"
_CHANGED = "its transcripts or its model are no longer those of the run; take it as it was written"


def trace_figures(trace: LoadTrace) -> TraceFigures:
    """Return what a plan records of its trace."""
    return TraceFigures(
        form=trace.form,
        sha256=trace.sha256,
        sessions=len(trace.sessions),
        calls=trace.calls,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        prefix_hits=trace.prefix_hits,
        notes=list(trace.notes),
    )


def recorded_messages(
    model: str, gap_s: float = 0.0, kept: list[Recording] | None = None
) -> ReadMessages:
    """Return what reads recorded chat messages in a model's tokens, with a gap between calls.

    `kept` gets the sessions, in their order.
    """

    def read(path: Path) -> list[jobs.TraceSession]:
        found = record_file(path, model)
        if kept is not None:
            kept.extend(found)
        return sessions_of(found, gap_s)

    return read


def run_trace(folder: Path, recorded: RecordedRun, gap_s: float) -> LoadTrace:
    """Return a run's own sessions to be played, with a gap between calls.

    UsageError if they are not what it played: a method that drops messages, or adds some, does so
    on its way from the agent to the engine, where nobody recorded it.
    """
    reader, recordings = RunReader(folder), recorded.recordings
    changes = RunSpec.of(reader.info.spec).built_method.messages
    lengths = {each.sample_id: each.kv.logical for each in reader.trials() if not each.trial}
    for recording in recordings:
        if recording.tokens != (found := lengths[recording.sample]):
            raise UsageError(
                f"{folder}: played again, session {recording.sample} has {recording.tokens} tokens "
                f"and not {found}; "
                + ("take a run whose method leaves messages as they are" if changes else _CHANGED)
            )
    count = f"{len(recordings)} of the {recorded.sessions} sessions of the run"
    notes = (_OF_RUN, count) if len(recordings) < recorded.sessions else (_OF_RUN,)
    sha = hashlib.sha256("".join(recording.sha for recording in recordings).encode()).hexdigest()
    return LoadTrace(folder.name, "run", sha, tuple(sessions_of(recordings, gap_s)), notes)


def sessions_of(recordings: Sequence[Recording], gap_s: float) -> list[jobs.TraceSession]:
    """Return recorded sessions to be played, with a gap between calls."""
    sessions = []
    for recording in recordings:
        calls = [
            jobs.TraceCall(
                len(turn.prompt) - turn.again,
                len(turn.answer),
                gap_s if number else 0.0,
                ids=[token for token, _ in turn.prompt],
                keep=turn.keep,
                again=turn.again,
            )
            for number, turn in enumerate(recording.turns)
        ]
        sessions.append(jobs.TraceSession(recording.sample, calls))
    return sessions
