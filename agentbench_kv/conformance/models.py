"""Families x engines: whether an engine is exact on a family's tiny model, or refuses it.

The oracle is Hugging Face's own eager attention over the whole session (`reference`): every token
must be its first choice, and every kept set what the method keeps on its queries and keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import SessionTrace, TurnPlan
from agentbench_kv.conformance.engines.comparison import error_problem, wrong_tokens
from agentbench_kv.conformance.engines.fixture import Fixture, Sessions, prompt
from agentbench_kv.conformance.families import FAMILIES, write_family
from agentbench_kv.conformance.kept_sets import check_replay
from agentbench_kv.engines.base import EngineInfo
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import load_engine, make_method

METHODS = ("agentkv", "streamingllm", "streamingllm@paper", "full")
EXACT, REFUSED, SKIPPED, FAILED = "exact", "refused", "skipped", "FAILED"
TIE = 1e-3  # two logits that are nearer than this may come out in either order
_LEAST_TOKENS, _LEAST_EVENTS = 200, 3


@dataclass(frozen=True)
class ModelVerdict:
    """What became of one method on one family and engine."""

    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class FamilyRow:
    """A family on an engine."""

    family: str
    attention: str  # what is special about it
    engine: str
    reach: str  # layers whose rows a method reaches
    verdicts: dict[str, ModelVerdict] = field(default_factory=dict)  # by method

    @property
    def outcome(self) -> str:
        """All verdicts in one text: `exact`, or what holds for which methods and why."""
        return self._told(lambda why: f": {why}")

    def _told(self, reason: Callable[[str], str]) -> str:
        by_verdict = sorted(self.verdicts.items(), key=lambda item: self._order(item[1]))
        parts = []
        for (outcome, why), members in groupby(by_verdict, key=lambda item: self._order(item[1])):
            names = [name for name, _ in members]
            which = "" if len(names) == len(self.verdicts) else f" ({', '.join(names)})"
            parts.append(f"{outcome}{which}" + (reason(why) if why else ""))
        return "; ".join(parts)

    def _order(self, verdict: ModelVerdict) -> tuple[str, str]:
        # What an exact method was checked on is for `--json`.
        return verdict.outcome, "" if verdict.outcome == EXACT else verdict.detail

    @property
    def failed(self) -> bool:
        return any(verdict.outcome == FAILED for verdict in self.verdicts.values())

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": self.outcome}


def as_markdown(rows: Sequence[FamilyRow]) -> list[str]:
    """Return a table, a row a family and a column an engine, with its numbered reasons below."""
    reasons: dict[str, int] = {}

    def numbered(why: str) -> str:
        return f" [{reasons.setdefault(why, len(reasons) + 1)}]"

    engines = list(dict.fromkeys(row.engine for row in rows))
    lines = [["family", "attention", "layers in reach", *engines]]
    lines += [["---"] * len(lines[0])]
    for family in dict.fromkeys(row.family for row in rows):
        of = {row.engine: row for row in rows if row.family == family}
        reach = ", ".join(dict.fromkeys(row.reach for row in of.values() if row.reach))
        cells = [of[name]._told(numbered) if name in of else "" for name in engines]
        lines.append([family, FAMILIES[family].about, reach, *cells])
    table = [f"| {' | '.join(line)} |" for line in lines]
    return [*table, "", *(f"{number}. {why}" for why, number in reasons.items())]


def model_suite(
    engines: Sequence[str],
    families: Sequence[str] = (),
    *,
    methods: Sequence[str] = METHODS,
    engine_args: Mapping[str, str] | None = None,
    report: Callable[[FamilyRow], None] = lambda _row: None,
) -> list[FamilyRow]:
    """Drive every engine on every family's model; all families if none are named.

    An engine whose environment is not there is skipped with the reason. `report` is told every row
    as soon as it is known.
    """
    for name in families:
        if name not in FAMILIES:
            raise unknown_name("family", name, FAMILIES)
    for method in methods:
        make_method(method, 1 << 20)
    rows = []
    for engine in engines:
        cls = load_engine(engine)
        lacks = _lacks(cls)
        for family in families or FAMILIES:
            row = FamilyRow(family, FAMILIES[family].about, engine, "")
            if lacks:
                row.verdicts.update(dict.fromkeys(methods, ModelVerdict(SKIPPED, lacks)))
            else:
                row = _family_row(row, cls, methods, engine_args or {})
            rows.append(row)
            report(row)
    return rows


def _lacks(cls: Any) -> str:
    """Say why an engine cannot be started here; empty if it can."""
    try:
        cls.check_compute("float32", "cpu")
        cls.check_model("micro")
    except PrerequisiteError as error:
        return str(error)
    return ""


def _family_row(
    row: FamilyRow, cls: Any, methods: Sequence[str], engine_args: Mapping[str, str]
) -> FamilyRow:
    with tempfile.TemporaryDirectory(prefix="kvbench-family-") as scratch:
        folder = write_family(Path(scratch) / row.family, row.family)
        fixture = Fixture(cls, folder, engine_args)
        reach = ""
        try:
            for name in methods:
                verdict, found = _verdict(fixture, cls, folder, name)
                row.verdicts[name] = verdict
                reach = found or reach
        finally:
            fixture.close()
        return FamilyRow(row.family, row.attention, row.engine, reach, row.verdicts)


def _verdict(fixture: Fixture, cls: Any, folder: Path, name: str) -> tuple[ModelVerdict, str]:
    """Check one method; return with it which layers it reaches, if the engine started."""
    reach = ""
    try:
        method = fixture.method(name)
        cls.check_model(str(folder))
        cls.check_method(str(folder), method)
        driver = fixture.driver(method)
        reach = _reach(driver.engine.info)
        traces = driver.play(model_sessions())
        problem = next(_problems(fixture.network, method, traces), "")
    except UsageError as error:
        text = str(error).replace(str(folder), "MODEL")
        return ModelVerdict(FAILED if "\n" in text else REFUSED, text), reach
    except (KVBenchError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return ModelVerdict(FAILED, f"{type(error).__name__}: {error}"), reach
    tokens = sum(len(trace.decoded_at) for trace in traces.values())
    events = sum(len(trace.events) for trace in traces.values())
    about = problem or f"{tokens} tokens, {events} events"
    return ModelVerdict(FAILED if problem else EXACT, about), reach


def model_sessions() -> Sessions:
    """Return two sessions that run at the same time.

    One decodes much, the other has a prompt longer than any window and a prefill chunk.
    """
    sizes = {"long": [(90, 75), (40, 70), (60, 75)], "late": [(600, 20), (20, 25)]}
    return {
        name: [TurnPlan(prompt(n, 10 * number + turn), out) for turn, (n, out) in enumerate(turns)]
        for number, (name, turns) in enumerate(sizes.items())
    }


def _problems(network: Any, method: Method, traces: Mapping[str, SessionTrace]) -> Iterator[str]:
    """Yield what is wrong, the cheapest to find first."""
    long = traces["long"]
    for name, trace in traces.items():
        for problem in (error_problem(trace), trace.kept_missing):
            if problem:
                yield f"{name}: {problem}"
    if len(long.decoded_at) < _LEAST_TOKENS:
        yield f"only {len(long.decoded_at)} tokens were generated"
    if method.compresses and len(long.events) < _LEAST_EVENTS:
        yield f"only {len(long.events)} events"
    for name, trace in traces.items():
        wrong = [each for each in wrong_tokens(network, trace, method.positions) if each.gap > TIE]
        if wrong:
            yield f"{name}: {len(wrong)} of {len(trace.decoded_at)} tokens differ, first {wrong[0]}"
        replayed: CheckResult = check_replay(name, network, method, trace)
        if not replayed.ok:
            yield f"{replayed.name}: {replayed.detail}"


def _reach(info: EngineInfo) -> str:
    """Say which layers a method reaches."""
    found = info.reach
    return "all" if found is None else f"{found.full} of {found.full + found.windowed}"
