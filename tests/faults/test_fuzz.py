"""Random inputs for what reads text, requests, records and captures: `benchmarks/fuzz.py`."""

from __future__ import annotations

import fuzz
import pytest

from agentbench_kv.errors import UsageError

# Together 10^5; `.ci/run nightly` takes 10^6 of each.
INPUTS = {
    "parser": 25_000, "phases": 20_000, "requests": 25_000, "records": 20_000,
    "torn_files": 5_000, "captures": 5_000,
}  # fmt: skip


def said(findings: list[fuzz.Finding]) -> str:
    return "\n".join(f"{each.target} --from {each.number}: {each.what}" for each in findings)


@pytest.mark.slow
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_nothing_breaks(target: str) -> None:
    assert said(fuzz.fuzz(target, INPUTS[target])) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_nothing_breaks_in_a_million(target: str) -> None:
    assert said(fuzz.fuzz(target, 1_000_000, seed=1)) == ""


def test_findings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def poor(rng: fuzz.Rng) -> None:
        match rng.randrange(4):
            case 0:
                raise KeyError("a traceback")
            case 1:
                raise UsageError("two\nlines")
            case 2:
                raise UsageError("one line")
            case _:
                while True:  # busy: patience is of the processor's time
                    pass

    monkeypatch.setattr(fuzz, "PATIENCE_S", 0.2)
    monkeypatch.setitem(fuzz.TARGETS, "poor", fuzz.Target(poor, (UsageError,)))
    found = fuzz.fuzz("poor", 40, most=40)
    assert {each.what.split()[0] for each in found} == {"Traceback", "more"}
    for word in ("KeyError", "more than a line", "Hang: no end"):
        assert any(word in each.what for each in found)
    (again,) = fuzz.fuzz("poor", 1, first=found[0].number)
    assert again == found[0]
