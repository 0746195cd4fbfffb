"""A run's own page: every figure with where it comes from, timeline, failures, transcripts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentbench_kv.results.runs import Problem, Run
from agentbench_kv.results.site.text import visible
from agentbench_kv.results.site.timeline import overview, read_turns, session, timeline
from agentbench_kv.results.site.transcripts import transcripts

MOST_FAILURES = 200
MOST_SAMPLES = 1000
_HASHED = ("samples.jsonl", "turns.jsonl", "run.json")


def context(run: Run, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return what the template of a run's page shows."""
    trials = run.records()
    failed = [record for record in trials if record.score is None]
    return {
        "run": run,
        "summary": run.summary,
        "notes": [*run.summary.notes, *(p.reason for p in problems if p.path == run.path)],
        "failed": failed[:MOST_FAILURES],
        "failed_more": max(0, len(failed) - MOST_FAILURES),
        "samples": trials[:MOST_SAMPLES],
        "samples_more": max(0, len(trials) - MOST_SAMPLES),
        "transcripts": transcripts(run.path, trials),
        "spec": list(_flat(run.spec)),
        "provenance": list(_flat(run.info.provenance)),
        "files": list(_hashes(run.path)),
        **_timelines(run),
    }


def _timelines(run: Run) -> dict[str, Any]:
    trials = read_turns(run.path / "turns.jsonl")
    if not trials:
        return {"turn_figures": []}
    longest = max(trials, key=lambda turns: (sum(t.events for t in turns), len(turns)))
    figures = overview(trials)
    budget = run.tokens if isinstance(run.budget, int) else None
    return {
        "turn_figures": figures,
        "turn_trials": len(trials),
        "turns_clipped": len(trials) < run.summary.trials,
        "timeline": timeline(figures, budget),
        "session": session(longest, budget),
        "session_name": f"{visible(longest[0].sample_id, 80)}, trial {longest[0].trial}",
    }


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield `a.b` and its value for every leaf."""
    for key, value in data.items():
        name = f"{prefix}{visible(key, 60)}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield name, visible(text)


def _hashes(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield name, bytes and SHA-256 of each file that the page's figures come from."""
    for name in _HASHED:
        path = folder / name
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield name, path.stat().st_size, digest
