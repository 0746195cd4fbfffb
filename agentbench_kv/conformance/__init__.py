"""Conformance suites for plug-ins: what every method, engine and task must do.

Plain functions without a test framework; a suite returns part -> a list of `CheckResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """One property, whether it holds, and the first counterexample (or a figure) in words."""

    name: str
    ok: bool
    detail: str = ""
    skipped: bool = False  # it could not be checked, `detail` says why; `ok` is True then

    @classmethod
    def unless(cls, problem: str, name: str, detail: str = "") -> CheckResult:
        """Return a result that fails with a problem, and holds if there is none."""
        return cls(name, not problem, problem or detail)


def guarded(
    check: Callable[[], list[CheckResult]], reraise: tuple[type[Exception], ...] = ()
) -> list[CheckResult]:
    """Run a part of a suite; what it raises is a failed result, except the types to `reraise`."""
    try:
        return check()
    except reraise:
        raise
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        return [CheckResult("runs to the end", False, f"{type(error).__name__}: {error}")]


def passed(results: Mapping[str, Sequence[CheckResult]]) -> bool:
    """Return whether every result of a suite is good."""
    return all(result.ok for part in results.values() for result in part)
