"""How often the statistics are wrong: coverage, false verdicts, power, false differences.

    python benchmarks/intervals.py [--draws 4000] [--only levels,counts,changes,power,tables]

Prints the tables of docs/coverage.md. `tests/results/test_results_stats_coverage.py` runs the same
functions with fewer draws. Everything is seeded; 4,000 draws take about half an hour on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, multinomial

from agentbench_kv.results.ranking import Entry, rank
from agentbench_kv.results.runs import RunGroup
from agentbench_kv.results.stats import Change, Scores, change, holm, level

Floats = NDArray[np.float64]
Rng = np.random.Generator

SIZES = (10, 20, 50, 200)
SHARES = tuple(round(0.05 * i, 2) for i in range(1, 20))
GATE = 0.97
MARGIN, CATCH = 0.01, 0.10


def scores(values: Floats, group: int | None = None) -> Scores:
    """Take [samples] or [samples, trials] scores; `group` samples in a row belong together."""
    table = values[:, None] if values.ndim == 1 else values
    names = [f"s{i:05d}" for i in range(len(table))]
    groups = {name: f"g{i // group}" for i, name in enumerate(names)} if group else {}
    return Scores.of_trials(dict(zip(names, table.tolist(), strict=True)), groups)


# Levels.


def binary_coverage(n: int) -> list[float]:
    """Return the exact coverage of one binary score a sample, for every share right."""
    found = [level(scores(np.repeat([1.0, 0.0], [right, n - right]))) for right in range(n + 1)]
    chances = [binom.pmf(np.arange(n + 1), n, share) for share in SHARES]
    return [
        float(
            sum(p for p, ends in zip(chance, found, strict=True) if ends.low <= share <= ends.high)
        )
        for share, chance in zip(SHARES, chances, strict=True)
    ]


REPEATED: dict[str, Callable[[Rng, int, float], Floats]] = {
    "3 trials, all alike": lambda rng, n, p: rng.binomial(1, p, (n, 3)).astype(float),
    "3 trials, samples differ": lambda rng, n, p: rng.binomial(
        1, rng.beta(1.5 * p, 1.5 * (1 - p), (n, 1)), (n, 3)
    ).astype(float),
    "3 trials, always the same": lambda rng, n, p: np.repeat(
        rng.binomial(1, p, (n, 1)).astype(float), 3, 1
    ),
}


def repeated_coverage(kind: str, n: int, draws: int) -> list[float]:
    """Return the simulated coverage of three trials a sample, for every share right."""
    rng = np.random.default_rng(n)
    covered = []
    for share in SHARES:
        found = (level(scores(REPEATED[kind](rng, n, share))) for _ in range(draws))
        covered.append(float(np.mean([ends.low <= share <= ends.high for ends in found])))
    return covered


UNLIKE = {"all alike": None, "differ": 10.0, "differ much": 2.0}  # weight of the beta distribution
FEW = tuple(product((3, 5, 10, 20), (20, 150)))  # samples, questions of each


def counted_coverage(samples: int, questions: int, kind: str, draws: int) -> list[float]:
    """Return the simulated coverage of right answers among many of few samples, by share right.

    As evidence that was found, or questions that were attempted, in a few conversations.
    """
    rng, weight = np.random.default_rng(samples), UNLIKE[kind]
    covered = []
    for share in (0.1, 0.5, 0.9):
        held = 0
        for _ in range(draws):
            ease = (share,) * samples
            if weight is not None:
                ease = rng.beta(weight * share, weight * (1 - share), samples)
            right = rng.binomial(questions, ease)
            counts = {f"s{i}": (float(k), float(questions)) for i, k in enumerate(right)}
            found = level(Scores.of_counts(counts))
            held += found.low <= share <= found.high
        covered.append(held / draws)
    return covered


# Changes: shapes of paired data, each with its true level and its true change.


@dataclass(frozen=True)
class Shape:
    """Paired data as a benchmark gives them: `draw` returns candidate and base."""

    name: str
    draw: Callable[[Rng], tuple[Scores, Scores]]
    level: float  # of the candidate
    change: float


def rare_losses(n: int, share: float, jitter: float = 0.01) -> Shape:
    """Graded scores of 0.8 that all move a little; a share of the candidate's are lost whole."""

    def draw(rng: Rng) -> tuple[Scores, Scores]:
        base, cand = (np.clip(0.8 + rng.normal(0, jitter, n), 0, 1) for _ in range(2))
        return scores(cand * (rng.random(n) >= share)), scores(base)

    return Shape(f"rare losses {share:.0%}, n {n}", draw, 0.8 * (1 - share), -0.8 * share)


def rare_gains(n: int, share: float) -> Shape:
    """All lose a little, a few gain much: no change on average."""
    lost = share * 0.8

    def draw(rng: Rng) -> tuple[Scores, Scores]:
        base = np.full(n, 0.1 + lost)
        won = rng.random(n) < share
        return scores(base - lost + 0.8 * won), scores(base)

    return Shape(f"rare gains {share:.0%}, n {n}", draw, 0.1 + lost, 0.0)


def binary(n: int, discordance: float, loss: float) -> Shape:
    """One binary score a sample; `discordance` of them differ between the sides."""
    lost, won = (discordance + loss) / 2, (discordance - loss) / 2

    def draw(rng: Rng) -> tuple[Scores, Scores]:
        kind = rng.choice(4, n, p=[lost, won, 0.5 - lost, 0.5 - won])
        return scores(np.isin(kind, (1, 3)).astype(float)), scores(
            np.isin(kind, (0, 3)).astype(float)
        )

    return Shape(f"binary {discordance:.0%}/{loss:.0%}, n {n}", draw, 0.5, -loss)


def grouped(groups: int, size: int = 20, spread: float = 0.7, loss: float = 0.04) -> Shape:
    """Questions of conversations: some conversations are easier, and some lose more than others."""
    n, number = groups * size, np.repeat(np.arange(groups), size)

    def chances(rng: Rng, count: int) -> tuple[Floats, Floats]:
        ease = 1 / (1 + np.exp(-(0.4 + spread * rng.normal(0, 1, count))))
        return ease, np.clip(loss + 0.04 * rng.normal(0, 1, count), 0, 1)

    def draw(rng: Rng) -> tuple[Scores, Scores]:
        ease, lost = (each[number] for each in chances(rng, groups))
        base = rng.random(n) < ease
        cand = np.where(base, rng.random(n) >= lost + 0.03, rng.random(n) < 0.03)
        return scores(cand.astype(float), size), scores(base.astype(float), size)

    ease, lost = chances(np.random.default_rng(0), 2_000_000)
    moved = float((-ease * (lost + 0.03) + (1 - ease) * 0.03).mean())
    return Shape(f"{groups} groups of {size}", draw, float(ease.mean()) + moved, moved)


def shapes() -> Iterator[Shape]:
    """Yield every shape of the table."""
    for n, share in product((10, 20, 50, 100, 200), (0.02, 0.05)):
        yield rare_losses(n, share)
    for n in (20, 200):
        yield rare_gains(n, 0.025)
    for count in (5, 10, 20):
        yield grouped(count)
    for n, discordance, loss in (
        (20, 0.15, 0.05),
        (50, 0.15, 0.05),
        (200, 0.15, 0.02),
        (200, 0.05, 0.02),
    ):
        yield binary(n, discordance, loss)


@dataclass(frozen=True)
class Rates:
    """How often an interval misses: the level's at all; the change's from below, above, at all.

    `ok` and `regression` are false verdicts where the margin is the true loss, the worst case.
    """

    level: float
    change: float
    ok: float
    regression: float
    width: float


def rates(shape: Shape, draws: int) -> Rates:
    """Simulate a shape."""
    rng = np.random.default_rng(1)
    missed, gaps, strict = 0, list[Change](), list[Change]()
    for _ in range(draws):
        cand, base = shape.draw(rng)
        ends = level(cand)
        missed += not ends.low <= shape.level <= ends.high
        gaps.append(_change(cand, base))
        strict.append(_change(cand, base, GATE))
    return Rates(
        level=missed / draws,
        change=float(np.mean([not gap.low <= shape.change <= gap.high for gap in gaps])),
        ok=float(np.mean([gap.low > shape.change for gap in gaps])),
        regression=float(np.mean([gap.high < shape.change for gap in strict])),
        width=float(np.mean([gap.high - gap.low for gap in gaps])),
    )


def _change(cand: Scores, base: Scores, confidence: float = 0.95) -> Change:
    found = change(cand, base, confidence, tested=False)
    if found is None:
        raise ValueError("the sides share no sample")
    return found


# Power of the gate, exactly.


def gate_chances(n: int, discordance: float, loss: float) -> tuple[float, float]:
    """Return the exact chances of `regression` and of `ok` for plain binary scores."""
    lost, won = (discordance + loss) / 2, (discordance - loss) / 2
    law = multinomial(n, [lost, won, 1 - lost - won])
    regression = ok = 0.0
    for losses in range(n + 1):
        for wins in range(n - losses + 1):
            chance = float(law.pmf([losses, wins, n - losses - wins]))
            if chance < 1e-9:
                continue
            values = np.repeat([-1.0, 1.0, 0.0], [losses, wins, n - losses - wins])
            cand, base = scores((values > 0).astype(float)), scores((values < 0).astype(float))
            worse = _change(cand, base, GATE).high < -MARGIN
            regression += chance * worse
            ok += chance * (not worse and _change(cand, base).low > -CATCH)
    return regression, ok


# Tables: methods x budgets without any difference.

KINDS = ("binary", "graded", "grouped")


def table_differs(kind: str, draws: int, methods: int = 9, budgets: int = 5) -> tuple[float, float]:
    """Return how many tables of equal methods tell two of them apart: by rank, and from full."""
    rng = np.random.default_rng(3)
    ranked = compared = 0
    for _ in range(draws):
        full, *cells = _equal(kind, rng, methods * budgets + 1)
        contests = [
            [Entry(RunGroup(f"m{i}", ()), each, level(each)) for i, each in enumerate(row)]
            for row in (cells[b * methods : (b + 1) * methods] for b in range(budgets))
        ]
        ranked += any(each.rank != 1 for contest in rank(contests) for each in contest)
        p_values = [gap.p_value for cell in cells if (gap := change(cell, full)) is not None]
        compared += min(holm(p_values)) < 0.05
    return ranked / draws, compared / draws


def _equal(kind: str, rng: Rng, number: int) -> list[Scores]:
    """Draw sides that differ by chance only; what makes a sample hard is shared."""
    n, size = (200, 20) if kind == "grouped" else (50, None)
    ease = rng.beta(1.2, 0.8, n)
    if kind == "graded":
        return [scores(np.clip(ease + rng.normal(0, 0.1, n), 0, 1)) for _ in range(number)]
    found = []
    for _ in range(number):
        shift = np.repeat(rng.normal(0, 0.1, n // 20), 20) if size else 0.0
        found.append(scores((rng.random(n) < np.clip(ease + shift, 0, 1)).astype(float), size))
    return found


# Printing.


def print_levels(draws: int) -> None:
    """Print coverage of levels."""
    print("| scores | n | mean coverage | least | at |\n|---|--:|--:|--:|--:|")
    for kind, n in product(("1 trial (exact)", *REPEATED), SIZES):
        found = repeated_coverage(kind, n, draws) if kind in REPEATED else binary_coverage(n)
        least = int(np.argmin(found))
        print(
            f"| {kind} | {n} | {np.mean(found):.1%} | {found[least]:.1%} | {SHARES[least]} |",
            flush=True,
        )


def print_counts(draws: int) -> None:
    """Print coverage of levels of many questions in few samples."""
    print("| samples | questions of each | right | mean coverage | least |")
    print("|--:|--:|---|--:|--:|")
    for (samples, questions), kind in product(FEW, UNLIKE):
        found = counted_coverage(samples, questions, kind, draws)
        row = f"| {samples} | {questions} | {kind} | {np.mean(found):.1%} | {min(found):.1%} |"
        print(row, flush=True)


def print_changes(draws: int) -> None:
    """Print coverage of levels and changes, and false verdicts, in every shape."""
    print("| shape | level | change | false ok | false regression | width, points |")
    print("|---|--:|--:|--:|--:|--:|")
    for shape in shapes():
        found = rates(shape, draws)
        print(
            f"| {shape.name} | {1 - found.level:.1%} | {1 - found.change:.1%} "
            f"| {found.ok:.1%} | {found.regression:.1%} | {100 * found.width:.1f} |",
            flush=True,
        )


def print_power(_: int) -> None:
    """Print the gate's exact chances."""
    print("| n | discordance | true loss | regression | ok |\n|--:|--:|--:|--:|--:|")
    for n, discordance, loss in product((50, 100, 200), (0.05, 0.15), (0.0, 0.01, 0.05, 0.1)):
        if loss <= discordance:
            worse, fine = gate_chances(n, discordance, loss)
            print(
                f"| {n} | {discordance:.0%} | {loss:.0%} | {worse:.1%} | {fine:.1%} |",
                flush=True,
            )


def print_tables(draws: int) -> None:
    """Print how many tables of equal methods say that two differ."""
    print("| scores | by rank | from full (Holm) |\n|---|--:|--:|")
    for kind in KINDS:
        ranked, compared = table_differs(kind, max(draws // 4, 1))
        print(f"| {kind} | {ranked:.1%} | {compared:.1%} |", flush=True)


PARTS: dict[str, Callable[[int], None]] = {
    "levels": print_levels,
    "counts": print_counts,
    "changes": print_changes,
    "power": print_power,
    "tables": print_tables,
}


def main() -> None:
    """Print what was asked for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--draws", type=int, default=4000)
    options.add_argument("--only", default=",".join(PARTS))
    given = options.parse_args()
    for part in given.only.split(","):
        PARTS[part](given.draws)
        print()


if __name__ == "__main__":
    main()
