"""What a run that faults befell must look like: the run that nothing befell.

Reads files with its own few lines, so that an error of the store cannot hide itself.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where a field's value may differ between two undisturbed runs; everything else may not.
VOLATILE = {
    # Who plays BFCL's memory conversations is chance, see decision 18.
    "samples": {"timing", "attempts", "prerequisites_played"},
    "turns": {"ttft_ms", "tpot_ms"},
    "summary": {
        "wall_s", "tokens_per_s", "ttft_ms", "tpot_ms", "infra_retries", "user_retries",
        "alien_lines", "notes",
    },
    # The name of a session ends in the attempt and the sample.
    "transcripts": {"prerequisites", "seconds", "session", "ttft_ms", "tpot_ms"},
}  # fmt: skip
# What a backend's death changes in a trial that went on after it, and says so by `recomputed`.
AFTER_LOSS = {"recomputed", "prefill_tokens", "longest_prefill", "bytes_read", "kv_bytes_read"}
UNFINISHED = {"engine_error", "infra_error"}
SUPERSEDED = {*UNFINISHED, "user_error"}  # another attempt may follow

Key = tuple[str, int]


@dataclass(frozen=True)
class Problem:
    """What is wrong: a trial `lost`, `doubled` or `false`, something `left` behind, or `ended`.

    The last means that an attempt ended badly: with a traceback, never, or with 0 while trials are
    missing.
    """

    what: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {self.where}: {self.detail}"


def lines_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of a file and how many lines are none; a torn end is neither."""
    try:
        *whole, _torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    found, odd = [], 0
    for raw in whole:
        try:
            found.append(dict(json.loads(raw)))
        except (ValueError, TypeError):
            odd += 1
    return found, odd


def key_of(record: Mapping[str, Any]) -> Key:
    return str(record["sample_id"]), int(record["trial"])


def run_folder(out: Path) -> Path | None:
    """Return the one run of a folder of runs, None if there is none yet."""
    found = sorted(path for path in out.glob("*") if path.is_dir()) if out.is_dir() else []
    if len(found) > 1:
        raise ValueError(f"{out} holds {len(found)} runs, where the same command makes one")
    return found[0] if found else None


def finished(record: Mapping[str, Any]) -> bool:
    return record["status"] not in UNFINISHED


class Undisturbed:
    """The finished run of the same command that nothing happened to."""

    def __init__(self, run: Path) -> None:
        self.run = run
        records, odd = lines_of(run / "samples.jsonl")
        self.trials = {key_of(record): record for record in records if finished(record)}
        self.turns = last_turns(run)
        self.summary = json.loads((run / "summary.json").read_bytes())
        expected = json.loads((run / "run.json").read_bytes())["expected_trials"]
        if odd or len(records) != expected or len(self.trials) != expected:
            raise ValueError(f"{run} is no undisturbed run: {len(records)} records of {expected}")

    def complete(self, run: Path | None) -> bool:
        """Whether every trial is on record, whatever it came to, and the run says so itself."""
        if run is None or not (run / "summary.json").is_file():
            return False
        latest = {key_of(record): record for record in lines_of(run / "samples.jsonl")[0]}
        done = {key for key, record in latest.items() if finished(record)}
        status = json.loads((run / "run.json").read_bytes())["status"]
        return done >= set(self.trials) and status == "complete"


def last_turns(run: Path) -> dict[Key, list[dict[str, Any]]]:
    """Return the turns of each trial's last attempt."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for turn in lines_of(run / "turns.jsonl")[0]:
        turns = found.setdefault(key_of(turn), [])
        if turns and turn["turn"] <= turns[-1]["turn"]:
            turns.clear()
        turns.append(turn)
    return found


def check_records(run: Path, calm: Undisturbed) -> list[Problem]:
    """Check every line of `samples.jsonl`, at any time: nothing twice, nothing false."""
    records, _ = lines_of(run / "samples.jsonl")
    ended = Counter(key_of(each) for each in records if each["status"] not in SUPERSEDED)
    found = [
        Problem("doubled", _trial(key), f"{count} records that count")
        for key, count in ended.items()
        if count > 1
    ]
    for record in records:
        if not finished(record):
            continue
        if (expected := calm.trials.get(key_of(record))) is None:
            found.append(Problem("false", _trial(key_of(record)), "no such trial"))
            continue
        for place, was, now in _differences(expected, record, _free(record, expected)):
            detail = f"{place} is {now!r}, undisturbed {was!r}"
            if record.get("error"):
                detail += f" ({str(record['error'])[-200:]})"
            found.append(Problem("false", _trial(key_of(record)), detail))
            break  # the first of them says enough
    return found


def check_finished(run: Path, calm: Undisturbed, holes: int = 0) -> list[Problem]:
    """Check a run that is said to be complete; `holes` lines were made unreadable on purpose."""
    records, odd = lines_of(run / "samples.jsonl")
    latest = {key_of(record): record for record in records}
    found = check_records(run, calm)
    found += [
        Problem("lost", _trial(key), "no finished record")
        for key in calm.trials
        if key not in latest or not finished(latest[key])
    ]
    if odd > holes:
        found.append(Problem("lost", "samples.jsonl", f"{odd} unreadable lines, {holes} expected"))
    turns = last_turns(run)
    for key, record in latest.items():
        expected = calm.trials.get(key)
        if expected is None:
            continue
        found += _check_turns(key, record, expected, turns.get(key, []), calm.turns.get(key, []))
        found += _check_transcript(run, calm.run, record, expected)
    return [*found, *_check_summary(run, calm, records), *_leftovers(run)]


def _check_turns(
    key: Key,
    record: Mapping[str, Any],
    expected: Mapping[str, Any],
    turns: list[dict[str, Any]],
    calm: list[dict[str, Any]],
) -> Iterator[Problem]:
    if len(turns) != len(calm):
        yield Problem("false", _trial(key), f"{len(turns)} turns, undisturbed {len(calm)}")
        return
    loss = _lossy(record, expected)
    for now, was in zip(turns, calm, strict=True):
        for place, before, after in _differences(was, now, VOLATILE["turns"] | loss):
            if loss and place in ("live_before", "live_after") and after == 0:
                continue  # the backend died right before or behind this turn: nothing was live
            detail = f"turn {was['turn']}: {place} is {after!r}, undisturbed {before!r}"
            yield Problem("false", _trial(key), detail)
            return


def _check_transcript(
    run: Path, calm: Path, record: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[Problem]:
    place = _trial(key_of(record))
    if record.get("transcript") is None:
        if expected.get("transcript") is not None:
            yield Problem("lost", place, "no transcript")
        return
    try:
        now = json.loads((run / str(record["transcript"])).read_bytes())
    except (OSError, ValueError) as error:
        yield Problem("lost", place, f"its transcript: {error}")
        return
    was = json.loads((calm / str(expected["transcript"])).read_bytes())
    free = VOLATILE["transcripts"] | ({"events"} if _lossy(record, expected) else set())
    for where, before, after in _differences(was, now, free):
        detail = f"transcript {where} is {str(after)[:80]!r}, undisturbed {str(before)[:80]!r}"
        yield Problem("false", place, detail)
        return


def _check_summary(
    run: Path, calm: Undisturbed, records: list[dict[str, Any]]
) -> Iterator[Problem]:
    try:
        now = json.loads((run / "summary.json").read_bytes())
    except (OSError, ValueError) as error:
        yield Problem("lost", "summary.json", str(error))
        return
    lossy = any(_lossy(each, calm.trials.get(key_of(each), each)) for each in records)
    free = VOLATILE["summary"] | (AFTER_LOSS if lossy else set())
    for place, before, after in _differences(calm.summary, now, free):
        yield Problem("false", "summary.json", f"{place} is {after!r}, undisturbed {before!r}")
        return


def _leftovers(run: Path) -> Iterator[Problem]:
    for path in run.rglob(".*.tmp"):
        yield Problem("left", str(path.relative_to(run)), "a temporary file")
    lock = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield Problem("left", ".lock", "somebody still holds it")
    finally:
        os.close(lock)


def _free(record: Mapping[str, Any], expected: Mapping[str, Any]) -> set[str]:
    return VOLATILE["samples"] | _lossy(record, expected)


def _lossy(record: Mapping[str, Any], expected: Mapping[str, Any]) -> set[str]:
    """Return what may differ in a trial whose backend died under it, and which says so."""
    lost = record["kv"]["recomputed"] > expected["kv"]["recomputed"]
    return AFTER_LOSS if lost else set()


def _differences(
    was: Any, now: Any, free: set[str], place: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each place where two JSON values differ, but for the free names."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted({*was, *now} - free):
            yield from _differences(was.get(name), now.get(name), free, f"{place}.{name}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from _differences(before, after, free, f"{place}[{index}]")
    elif was != now:
        yield place.lstrip("."), was, now


def _trial(key: Key) -> str:
    return f"{key[0]} trial {key[1]}"
