"""`kvbench demo`: a method at work, to be watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli.options import NATURAL, POSITIVE, local, local_flag

if TYPE_CHECKING:
    from rich.console import Console

    from agentbench_kv.run.evoke_demo import Demo, FactShown, TurnShown

BAR = 48  # width of the budget in characters


@click.group()
def demo() -> None:
    """Watch a method at work on the shipped micro model."""


@demo.command()
@local("--budget", kind=POSITIVE, default=1024)
@local(
    "--recovery",
    "What becomes of evicted blocks.",
    click.Choice(["kv_restore", "discard", "breadcrumb"]),
    default="kv_restore",
)
@local("--block", kind=POSITIVE, default=64)
@local("--encoder", "As --set encoder takes it.", default="hash")
@local("--seed", "Another session than the shipped one.", NATURAL)
@local_flag("--full", "Show whole assistant messages.")
def evoke(budget: int, seed: int | None, full: bool, **settings: Any) -> None:
    """Play 14 turns in a cache of 1,024 tokens: facts first, the question about them last.

    The session grows to some 3,300 tokens. Each turn shows what left the cache (-), what came back
    without a forward pass (+) and how full it is at the end. Compare with --recovery discard.
    """
    from agentbench_kv.methods.evoke.method import Evoke
    from agentbench_kv.results import terminal
    from agentbench_kv.run.evoke_demo import SEED, Demo, episode_for

    console = terminal.console()
    method = Evoke.create("", budget, settings)
    shown = Demo(method, episode_for(SEED if seed is None else seed))
    for turn in shown.play():
        _show_turn(console, turn, budget, full)
    _show_end(console, shown)


def _show_turn(console: Console, turn: TurnShown, budget: int, full: bool) -> None:
    console.print(f"\nturn {turn.number}", style="bold")
    _line(console, "user ", turn.user)
    for answer in turn.answers if full else turn.answers[-1:]:
        _line(console, "agent", answer)
    filled = round(BAR * turn.live / budget)
    bar = "█" * filled + "·" * (BAR - filled)
    console.print(f"  [{bar}] {turn.live} of {budget}, session {turn.logical}", markup=False)
    for sign, spans in (("-", turn.evicted), ("+", turn.restored)):
        if spans:
            tokens = sum(end - start for start, end in spans)
            ranges = " ".join(f"{start}:{end}" for start, end in spans)
            text = f"  {sign} {len(spans)} blocks, {tokens} tokens: {ranges}"
            console.print(text, style="red" if sign == "-" else "green", markup=False)


def _line(console: Console, who: str, text: str) -> None:
    console.print(f"  {who} {' '.join(text.split())}", markup=False, highlight=False)


def _show_end(console: Console, shown: Demo) -> None:
    console.print("\nasked for in the last turn", style="bold")
    for fact in shown.facts():
        console.print(f"  {_story(fact)}", markup=False, highlight=False)
    turns = shown.turns
    evicted = sum(len(turn.evicted) for turn in turns)
    restored = sum(len(turn.restored) for turn in turns)
    wrong = [str(turn.number) for turn in turns if not turn.exact]
    console.print(
        f"\n{len(turns)} turns, {turns[-1].logical} tokens, at most {turns[-1].peak} in the cache; "
        f"{evicted} evictions, {restored} recoveries, {shown.unlike} of them with other rows than "
        f"had left; turns with a mistake: {', '.join(wrong) or 'none'}",
        markup=False,
    )


def _story(fact: FactShown) -> str:
    story = f"{fact.text}: stated in turn {fact.stated}"
    if fact.away:
        story += f", away at the end of turns {', '.join(map(str, fact.away))}"
    if fact.came_back is not None:
        story += f", back in turn {fact.came_back}"
    return f"{story}: {'recalled' if fact.recalled else 'NOT recalled'}"
