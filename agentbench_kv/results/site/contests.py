"""Who competes on a board, and what may be said of it: by budget, and by achieved KV."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentbench_kv.results.groups import budget_order
from agentbench_kv.results.ranking import Board, Entry, Rank, rank
from agentbench_kv.results.site.text import NOTHING

TIERS = (0.10, 0.25, 0.50, 0.75, 0.95)


@dataclass(frozen=True)
class Contest:
    """The entries that compete at a budget or in a tier, the best first.

    `others` are entries of the same methods that do not compete: a method is in a tier once.
    """

    name: str
    ranks: tuple[Rank, ...]
    others: tuple[Entry, ...] = ()

    @property
    def best(self) -> Entry:
        """Who has the highest score, by whatever margin."""
        return self.ranks[0].entry

    @property
    def alone(self) -> bool:
        """Whether there is one method only, in whatever settings."""
        return len({each.entry.group.method for each in self.ranks}) < 2

    @property
    def decides(self) -> bool:
        """Whether a place means anything: two methods, enough samples, and not all at 0."""
        return self.ranks[0].rank is not None and not self.alone and self.best.level.point > 0

    @property
    def leaders(self) -> list[Entry]:
        """Who leads, alone or tied; nobody where all are tied or no place means anything."""
        first = [each.entry for each in self.ranks if each.rank == 1]
        return first if self.decides and len(first) < len(self.ranks) else []

    def place(self, entry: Entry) -> str:
        """Return `1`, or `1=` if shared; a dash where places mean nothing."""
        rank = next((each.rank for each in self.ranks if each.entry is entry), None)
        if rank is None or not self.decides:
            return NOTHING
        return f"{rank}{'=' * (sum(each.rank == rank for each in self.ranks) > 1)}"

    def mark(self, entry: Entry) -> str:
        """Return `best`, `tied` or nothing."""
        leaders = self.leaders
        return ("tied" if len(leaders) > 1 else "best") if entry in leaders else ""


def by_budget(board: Board) -> list[Contest]:
    """Return a contest for each budget, ranked together."""
    budgets: dict[int | str | None, list[Entry]] = {}
    for entry in board.entries:
        if entry.group.compressed:
            budgets.setdefault(entry.group.budget, []).append(entry)
    ordered = sorted(budgets, key=budget_order)
    ranked = rank([budgets[name] for name in ordered], board.too_small is not None)
    return [Contest(str(name), tuple(row)) for name, row in zip(ordered, ranked, strict=True)]


def by_tier(board: Board) -> list[Contest]:
    """Return a contest for each tier of achieved KV, ranked together.

    A method stands in a tier with its largest budget there, which says nothing of the score.
    """
    tiers: dict[int, dict[str, list[Entry]]] = {}
    for entry in board.entries:
        share = kept(entry)
        if entry.group.compressed and share is not None:
            methods = tiers.setdefault(bisect_left(TIERS, share), {})
            methods.setdefault(entry.group.label, []).append(entry)
    chosen = {i: [max(own, key=_size) for own in tiers[i].values()] for i in sorted(tiers)}
    ranked = rank(list(chosen.values()), board.too_small is not None)
    return [
        Contest(tier_name(index), tuple(row), _rest(tiers[index], chosen[index]))
        for index, row in zip(chosen, ranked, strict=True)
    ]


def tier_name(index: int) -> str:
    """Return a tier as shown, e.g. `25-50%`."""
    ends = [0, *(round(100 * edge) for edge in TIERS), 100]
    return f"{ends[index]}–{ends[index + 1]}%"  # noqa: RUF001  an en dash between numbers


def kept(entry: Entry) -> float | None:
    """Return the achieved KV, the mean of peak live / logical over the trials that have it."""
    known = [(run.summary.kv, run.summary.trials) for run in entry.group.runs]
    shares = [(kv.live_over_logical, trials) for kv, trials in known if kv]
    trials = sum(count for _, count in shares)
    return sum(share * count for share, count in shares) / trials if trials else None


def _size(entry: Entry) -> tuple[int, float]:
    return entry.group.first.tokens or 0, kept(entry) or 0.0


def _rest(methods: Mapping[str, Sequence[Entry]], chosen: Sequence[Entry]) -> tuple[Entry, ...]:
    return tuple(entry for own in methods.values() for entry in own if entry not in chosen)
