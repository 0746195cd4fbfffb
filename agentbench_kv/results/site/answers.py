"""What a board says in words: for each budget, who leads and how far from full that is."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from agentbench_kv.results.ranking import Board, Entry
from agentbench_kv.results.site.contests import Contest
from agentbench_kv.results.site.text import percent, visible
from agentbench_kv.results.stats import change

_MOST_NAMES = 4


def answers(board: Board, contests: Sequence[Contest]) -> list[tuple[str, Markup]]:
    """Return name and sentence of each contest, or the one sentence that holds for all."""
    if not contests:
        return [("", Markup("No compressed run yet."))]
    if board.too_small:
        return [("", Markup("{}.").format(board.too_small))]
    return [(contest.name, _sentence(contest, board.full)) for contest in contests]


def family(contests: Sequence[Contest]) -> str:
    """Say which comparisons the places of some contests hold for together."""
    pairs = sum(len(contest.ranks) * (len(contest.ranks) - 1) // 2 for contest in contests)
    if pairs < 1:
        return ""
    return (
        f"Places rest on paired intervals adjusted (Bonferroni) for all {pairs} pairs of "
        f"methods here: in 19 of 20 such tables, no two equal methods get different places."
    )


def _sentence(contest: Contest, full: Entry | None) -> Markup:
    best, number = contest.best, len(contest.ranks)
    score = f"{percent(best.level)}{_to_full(best, full)}"
    if contest.alone:
        several = f" in {number} settings; the highest" if number > 1 else ""
        return Markup("Only {} has run{}: {}.").format(_name(best, number > 1), several, score)
    if best.level.point <= 0:
        return Markup("<b>Nobody leads</b>: all {} methods score 0%.").format(number)
    leaders = contest.leaders
    if len(leaders) == 1:
        return Markup("{} leads: {}.").format(_name(best), score)
    if leaders:
        return Markup("{} lead, tied. The highest: {}.").format(_names(leaders), score)
    least = 100 * contest.ranks[-1].entry.level.point
    return Markup(
        "<b>Nobody leads</b>: these samples cannot tell the {} methods apart, from {:.1f}% up. "
        "The highest: {}."
    ).format(number, least, score)


def _to_full(entry: Entry, full: Entry | None) -> str:
    found = full and change(entry.scores, full.scores, tested=False)
    if not found:
        return ""
    gap, low, high = (100 * value for value in (found.point, found.low, found.high))
    if found.tied:
        return f", not told apart from full ({gap:+.1f} points [{low:+.1f}, {high:+.1f}])"
    where, ends = ("below", (-high, -low)) if gap < 0 else ("above", (low, high))
    return f", {abs(gap):.1f} points {where} full [{ends[0]:.1f}, {ends[1]:.1f}]"


def _names(entries: Sequence[Entry]) -> Markup:
    shown = [_name(entry) for entry in entries[:_MOST_NAMES]]
    if len(entries) > _MOST_NAMES:
        shown.append(Markup("{} more").format(len(entries) - _MOST_NAMES))
    return Markup(" and ").join([Markup(", ").join(shown[:-1]), shown[-1]] if shown[1:] else shown)


def _name(entry: Entry, bare: bool = False) -> Markup:
    return Markup("<b>{}</b>").format(
        visible(entry.group.method if bare else entry.group.label, 80)
    )
