"""Write a benchmark's golden sessions to a file that `kvbench fidelity --from FILE` reads.

    python benchmarks/real_sessions.py probe/bfcl --seed 1 --sessions 20 --answers 5 \
        --longest 25000 --out FILE.jsonl
    python benchmarks/real_sessions.py probe/tau2/airline probe/tau2/retail --seed 1 \
        --sessions 15 --fewest 3 --answers 4 --out FILE.jsonl

They are the sessions that the same probe task asks about with the same seed, in its order; those
of several tasks by turns, each so many. With `--answers` each ends with that answer of the agent:
the later ones of a session cost most of the time, and sessions, not tokens, are what intervals are
made of. `--longest` leaves out sessions of more characters, tools included, `--fewest` those of
fewer answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path

from agentbench_kv.adapters.probe.session import ChatSession
from agentbench_kv.adapters.probe.task import ProbeTask
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import load_task


def chosen(
    task: str, seed: int, sessions: int, longest: int | None, fewest: int
) -> Iterator[ChatSession]:
    """Yield the first sessions that a probe task asks about with this seed."""
    probes = load_task(task).create({})
    if not isinstance(probes, ProbeTask):
        raise UsageError(f"{task} is no probe task; name one, such as probe/bfcl")
    try:
        taken = 0
        for sample in probes.samples(None, seed):
            session, _ = probes._chosen[sample.id]
            short = longest is None or characters(session) <= longest
            if short and len(session.answers) >= fewest:
                yield session
                taken += 1
            if taken == sessions:
                return
    finally:
        probes.close()


def by_turns(found: Mapping[str, Sequence[ChatSession]]) -> Iterator[ChatSession]:
    """Yield the first session of each task, then the second; a task's name tells equal ids."""
    for each in zip_longest(*found.values()):
        for task, session in zip(found, each, strict=True):
            if session is not None:
                name = f"{task.rpartition('/')[2]}/{session.id}" if len(found) > 1 else session.id
                yield replace(session, id=name)


def characters(session: ChatSession) -> int:
    return len(json.dumps(session.messages)) + len(json.dumps(session.tools))


def first_answers(session: ChatSession, answers: int | None) -> ChatSession:
    """Return a session that ends with its n-th answer, or with the last one if it has fewer."""
    ends = session.answers[:answers]
    return replace(session, messages=session.messages[: ends[-1] + 1]) if ends else session


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", help="probe tasks: probe/bfcl, probe/tau2/retail, ...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--answers", type=int, help="answers of each, all if not said")
    parser.add_argument("--longest", type=int, help="characters of a session at most")
    parser.add_argument("--fewest", type=int, default=0, help="answers of a session at least")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with asked.out.open("w", encoding="utf-8") as file:
        limits = asked.seed, asked.sessions, asked.longest, asked.fewest
        for session in by_turns({task: list(chosen(task, *limits)) for task in asked.tasks}):
            cut = first_answers(session, asked.answers)
            file.write(json.dumps(asdict(cut)) + "\n")


if __name__ == "__main__":
    main()
