"""What both sides of a comparison must share, and what is only said.

`refuses`: it can change the figure. `warns`: it should not; whoever doubts the verdict reads it.
The code of the method is neither, but for being one on each side: it is what a comparison is about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from agentbench_kv.results.files import leaves
from agentbench_kv.results.run_info import Resume
from agentbench_kv.results.runs import CONDITIONS, Run
from agentbench_kv.results.store import METHOD_CODE

Weight = Literal["refuses", "warns"]
Facts = dict[str, set[str]]  # name to the values that runs have
# Provenance that must be the same; `task` is data, checker and benchmark version.
REFUSES = (
    "model_sha", "task", "chat_template_sha", "tool_parser", "phase_family",
    "engine", "engine_details.version", "engine_details.attention", "engine_args", "api_model",
    "context_limit",
)  # fmt: skip
# Versions: another major or minor part refuses, another patch warns.
RELEASES = (
    "kvbench", "python",
    *(f"packages.{name}" for name in ("torch", "transformers", "tokenizers", "numpy", "kvpress")),
)  # fmt: skip
# Refuses where speed is compared, warns where scores are.
MACHINE = (
    "hardware", "kernels", "device", "concurrency", "max_live_tokens", "engine_details.environment",
    "engine_details.threads",
)  # fmt: skip
WARNS = ("packages.scipy", "engine_details", "api_endpoint")
# Where provenance does not have these, the spec says what was asked for.
_ASKED = (*CONDITIONS, "engine_args", "concurrency", "max_live_tokens")
_ROOTS = {name.partition(".")[0] for name in (*REFUSES, *RELEASES, *MACHINE, *WARNS)}
# Older versions recorded none: unknown, and no difference.
_LATELY = ("hardware.settings", "hardware.usable_cores", "engine_details.threads")
_FREE = frozenset({"seed", "limit", "trials", "concurrency"})
_WHOLE = tuple(name for name in CONDITIONS if name not in REFUSES)  # only a spec has these
_IF_GIVEN = ("engine_args",)  # not recorded is not given
_LONGEST = 16
_NOT_GIVEN = "not recorded"
# A run's value of each thing that runs differ in; None if it is not known.
_Profile = tuple[str | None, ...]


@dataclass(frozen=True)
class Drift:
    """One thing that differs: its name, the value on each side, and what that means."""

    name: str
    base: str
    cand: str
    weight: Weight = "refuses"

    def __str__(self) -> str:
        return f"{self.name} {self.base} -> {self.cand}"


def find_drift(base: Sequence[Run], cand: Sequence[Run], speed: bool = False) -> list[Drift]:
    """List what differs between two sides beyond method, budget and amount."""
    # For speed, machine and concurrency must be the same too.
    seeds, others = ({str(run.spec.get("seed")) for run in side} for side in (base, cand))
    found = [] if seeds & others else [Drift("seed", _spell(seeds), _spell(others))]
    found += _differing(_facts(map(_known, base)), _facts(map(_known, cand)), speed)
    found += [*_mixed("BASE", base, speed), *_mixed("CAND", cand, speed)]
    if speed:
        found += [*_other_work([*base, *cand]), *_other_files([*base, *cand])]
    return [*found, *_resumed([*base, *cand], speed), *_prompts(base, cand)]


def speed_conditions(run: Run) -> tuple[object, ...]:
    """Return what two runs must share for their speeds to compare: all that refuses."""
    facts = _facts([_known(run)])
    known = {name: sorted(values) for name, values in facts.items() if not _within(name, ("task",))}
    releases = {name: [_release(v) for v in known[name]] for name in RELEASES if name in known}
    names = (*REFUSES, *MACHINE, *CONDITIONS, *RELEASES)
    shared = {name: values for name, values in (known | releases).items() if _within(name, names)}
    return (
        repr(sorted(shared.items())),
        len(_work(run)),
        frozenset(map(bool, run.from_files.values())),
    )


def by_conditions(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Sort a setting's runs by all that refuses a comparison of scores, with what sets them apart.

    As `temperature=1.0`, joined by commas; empty where all are alike. A run that does not record
    something, as older versions do not, goes with most of those that it may be like.
    """
    known = [_conditions(run) for run in runs]
    names = dict.fromkeys(chain.from_iterable(known))
    values = {name: [each.get(name, _unsaid(name)) for each in known] for name in names}
    differ = {name: own for name, own in values.items() if len({*own} - {None}) > 1}
    sets: dict[_Profile, list[int]] = {}
    for number in range(len(runs)):
        sets.setdefault(tuple(own[number] for own in differ.values()), []).append(number)
    spelled = [_told(name, {value for value in own if value}) for name, own in differ.items()]
    found = []
    for profile, own in _joined(sets):
        told = [words[value] for words, value in zip(spelled, profile, strict=True) if value]
        found.append((", ".join(told), [runs[number] for number in own]))
    return found


def _conditions(run: Run) -> dict[str, str]:
    """Return the value of everything that a run's scores depend on; of versions, the release."""
    noted, starts = run.info.provenance, chain.from_iterable(map(_starts, run.info.resumes))
    found = {name: str(run.spec.get(name)) for name in _WHOLE}
    # An engine may have no limit, and say so; an older version said nothing.
    found |= {name: "None" for name in REFUSES if name in CONDITIONS and name in noted}
    for name, values in _facts([_known(run), *starts]).items():
        if not _within(name, _WHOLE) and _weigh(name, set(), values, speed=False) == "refuses":
            own = map(_release, values) if name in RELEASES else values
            found[name] = " and ".join(sorted(set(own)))
    return found


def _unsaid(name: str) -> str | None:
    return "None" if _within(name, _IF_GIVEN) else None


def _told(name: str, values: set[str]) -> dict[str, str]:
    """Spell each value of a name, in few characters where these tell them apart."""
    few = {value: value if name in CONDITIONS else _short(value) for value in values}
    spelled = few if len(set(few.values())) == len(values) else {value: value for value in values}
    return {value: f"{name}={text}" for value, text in spelled.items()}


def _joined(sets: Mapping[_Profile, list[int]]) -> list[tuple[_Profile, list[int]]]:
    """Put what is not known in every part to most of those that it may be like."""
    found: list[tuple[_Profile, list[int]]] = []
    for profile, own in sorted(sets.items(), key=lambda each: (each[0].count(None), each[1])):
        like = [each for each in found if _agree(each[0], profile)]
        most = max(like, key=lambda each: len(each[1]), default=((None,) * len(profile), []))
        pairs = zip(most[0], profile, strict=True)
        both = tuple(mine if theirs is None else theirs for theirs, mine in pairs)
        found = [each for each in found if each is not most]
        found.append((both, sorted([*most[1], *own])))
    return sorted(found, key=lambda each: each[1])


def _agree(one: _Profile, other: _Profile) -> bool:
    return all(None in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def _known(run: Run) -> dict[str, Any]:
    asked = {name: run.spec.get(name) for name in _ASKED}
    asked["max_live_tokens"] = asked["max_live_tokens"] or None  # 0, as an older spec has none
    noted = {name: run.info.provenance.get(name) for name in _ROOTS}
    return asked | {name: value for name, value in noted.items() if value is not None}


def _facts(documents: Iterable[Mapping[str, Any]]) -> Facts:
    facts: Facts = {}
    for name, value in chain.from_iterable(map(leaves, documents)):
        if value is not None and value != {}:
            facts.setdefault(name, set()).add(str(value))
    return facts


def _differing(base: Facts, cand: Facts, speed: bool, where: str = "") -> list[Drift]:
    return [
        Drift(f"{name}{where}", _spell(was), _spell(now), _weigh(name, was, now, speed))
        for name in sorted(base.keys() | cand.keys())
        for was, now in [(base.get(name, set()), cand.get(name, set()))]
        if was != now and ((was and now) or not _within(name, _LATELY))
    ]


def _weigh(name: str, base: set[str], cand: set[str], speed: bool) -> Weight:
    if name in RELEASES and base and cand:
        was, now = (set(map(_release, values)) for values in (base, cand))
        return "warns" if was == now else "refuses"
    if _within(name, MACHINE):
        return "refuses" if speed else "warns"
    return "refuses" if _within(name, (*REFUSES, *RELEASES, *CONDITIONS)) else "warns"


def _release(version: str) -> str:
    return re.sub(r"^(\d+\.\d+).*", r"\1", version)


def _within(name: str, names: Iterable[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in names)


def _mixed(side: str, runs: Sequence[Run], speed: bool) -> list[Drift]:
    """List what the runs of one side, which count as repetitions, have not in common.

    Both sides may have the same two values, and most runs of either another one.
    """
    asked = _apart([run.spec for run in runs])
    found = {name: values for name, values in asked.items() if not _within(name, _FREE)}
    for name, (first, *rest) in _apart(list(map(_known, runs))).items():
        if _weigh(name, {first}, set(rest), speed) == "refuses":
            found[name] = [first, *rest]
    found |= _apart([{METHOD_CODE: run.info.provenance.get(METHOD_CODE)} for run in runs])
    return [
        Drift(f"{name} within {side}", _short(first), " and ".join(map(_short, rest)))
        for name, (first, *rest) in sorted(found.items())
    ]


def _apart(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values, at least two, of each name that documents differ in."""
    facts = [_facts([document]) for document in documents]
    found = {}
    for name in sorted(set().union(*facts)):
        # What an older version did not record is no difference; what was not asked for is one.
        asked = _within(name, ("engine_args", "engine_details")) and not _within(name, _LATELY)
        missing = {_NOT_GIVEN} if asked else set()
        values = set().union(*(each.get(name, missing) for each in facts))
        if len(values) > 1:
            found[name] = sorted(values)
    return found


def _other_work(runs: Sequence[Run]) -> list[Drift]:
    """Name the first run whose trials are others than those of its seed, or another number."""
    # How many sessions there are decides how many share the engine, and so its speed.
    by_seed: dict[object, Run] = {}
    for run in runs:
        like = by_seed.setdefault(run.spec.get("seed"), run)
        played, wanted = _work(run), _work(like)
        if played != wanted or len(played) != len(_work(runs[0])):
            like = like if played != wanted else runs[0]
            shared = len(played & _work(like))
            told = f"{len(played)} in {run.run_id}, {shared} of them the same"
            return [Drift("trials", f"{len(_work(like))} in {like.run_id}", told)]
    return []


def _other_files(runs: Sequence[Run]) -> list[Drift]:
    """Name a trial whose past came from files in one run, and not, or less of it, in another.

    Reading a past takes most of such a trial's time, and files save it.
    """
    known: dict[tuple[str, int], tuple[int, Run]] = {}
    for run in runs:
        for key, now in sorted(run.from_files.items()):
            was, like = known.setdefault(key, (now, run))
            if was != now:
                told = f"{was} in sample {key[0]} of {like.run_id}"
                return [Drift("ingest_files", told, f"{now} of {run.run_id}")]
    return []


def _work(run: Run) -> set[tuple[str, int]]:
    return {(sample, trial) for sample, trials in run.scores.items() for trial, _ in trials}


def _resumed(runs: Iterable[Run], speed: bool) -> list[Drift]:
    """List what changed inside a run, between two of its starts."""
    found = []
    for run in runs:
        for resume in run.info.resumes:
            was, now = (_facts([start]) for start in _starts(resume))
            found += _differing(was, now, speed, f" within run {run.run_id}")
    return found


def _starts(resume: Resume) -> list[dict[str, Any]]:
    """Return what had changed: its values in the first start, and in this."""
    known = {k: v for k, v in resume.changed.items() if k.partition(".")[0] in _ROOTS}
    return [{name: pair[i] for name, pair in known.items()} for i in (0, 1)]


def _prompts(base: Sequence[Run], cand: Sequence[Run]) -> list[Drift]:
    found = []
    for run in cand:
        same = [other for other in base if other.spec.get("seed") == run.spec.get("seed")]
        theirs = dict(chain.from_iterable(other.prompts.items() for other in same))
        shared = run.prompts.keys() & theirs.keys()
        odd = sorted(key for key in shared if run.prompts[key] != theirs[key])
        if odd:
            reason = (
                f"prompts differ from the other side's in {len(odd)} of {len(shared)} trials, "
                f"first in sample {odd[0][0]} trial {odd[0][1]}"
            )
            found.append(Drift("prompts", "base", reason))
    return found


def _spell(values: set[str]) -> str:
    return " and ".join(sorted(map(_short, values))) if values else _NOT_GIVEN


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
