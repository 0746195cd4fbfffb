"""Evidence found along the expected session, for texts that the model can read but not write.

    python benchmarks/micro_forced.py play --out forced.jsonl --profile recall-4k-long \
        --sessions 12 --budget 1024 --method agentkv --method agentkv:sampler=recent
    python benchmarks/micro_forced.py table --out forced.jsonl

Every token of a held-out session goes through the engine's decode loop, with the events that fall
due, but instead of what the model would say the expected token is taken: a mistake has no
consequences. A fact is found if both tokens of its code are the likeliest where they are due.
Sessions already in the file are not played again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentbench_kv.adapters.micro.generate import PROFILES, held_out_seed
from agentbench_kv.analysis.rings import RingEvent, ring_events
from agentbench_kv.engines.base import Engine, EngineOptions, Sampling
from agentbench_kv.engines.embedded.observer import FedRows, Observer
from agentbench_kv.methods.base import Method, QueryKind, Selection
from agentbench_kv.phases.machine import PhaseMachine, PhaseTable
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.registry import make_method
from agentbench_kv.results.stats import Change, Scores, change, holm, level
from agentbench_kv.run.engines import start_engine
from agentbench_kv.training.micro.conversation import EVIDENCE, LABELS, TEMPLATE
from agentbench_kv.training.micro.data import RowEncoder, TrainingRow, episode_row
from agentbench_kv.training.micro.tokenizer import build_tokenizer

SOURCES = ("think", "act", "tool", "others")
KINDS = ("recurring", "one_shot")
WINDOW = 32  # tokens: as many as AgentKV's rings hold queries


class Script:
    """A constraint that allows the next token of a given text alone."""

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self._left = tokens[::-1]
        self._vocabulary = vocabulary

    def allowed(self) -> NDArray[np.bool_]:
        """Return the mask of one id."""
        mask = np.zeros(self._vocabulary, np.bool_)
        mask[self._left[-1]] = True
        return mask

    def accept(self, token: int) -> None:
        """Go on to the next."""
        if token != self._left.pop():
            raise RuntimeError(f"token {token} was drawn against the script")


class Guesses(Observer):
    """The likeliest token at every decoded position of every session, phases, and events."""

    def __init__(self) -> None:
        self.best: dict[str, dict[int, int]] = {}
        self.phases: dict[str, list[int]] = {}
        self.points: dict[str, list[int]] = {}

    def on_rows(self, rows: FedRows) -> None:
        self.phases.setdefault(rows.session, []).extend(rows.phases)

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        self.best.setdefault(session, {})[logical] = int(logits.argmax())

    def on_selection(
        self, session: str, logical: int, positions: Tensor, selection: Selection
    ) -> None:
        del positions, selection
        self.points.setdefault(session, []).append(logical)


@dataclass(frozen=True)
class Played:
    """One session of one arm, a line of the file."""

    profile: str
    method: str  # as it was asked for
    budget: int | None
    seed: int
    tokens: int
    events: int
    counts: dict[str, tuple[int, int]]  # codes found and asked, by `source/kind`
    within: tuple[int, int] | None  # queries of the rings in the recency window, and all

    @property
    def key(self) -> tuple[str, str, int | None, int]:
        """What tells lines apart."""
        return self.profile, self.method, self.budget, self.seed


def built(method: str, budget: int | None) -> Method:
    """Read `name` or `name:key=value,...`."""
    name, _, pairs = method.partition(":")
    settings = dict(pair.split("=", 1) for pair in pairs.split(",") if pair)
    made = make_method(name, None, settings) if name == "full" else None
    return made or make_method(name, budget, settings)


def force(engine: Engine, table: PhaseTable, session: str, row: TrainingRow) -> None:
    """Play one row: prompts are fed, what the agent says is drawn by force."""
    machine, vocabulary = PhaseMachine(table), len(load_tokenizer(engine.info.model_path))
    engine.open(session, machine)
    pairs = zip(row.ids.tolist(), (row.labels >= TEMPLATE).tolist(), strict=True)
    for spoken, part in groupby(pairs, key=lambda pair: pair[1]):
        tokens = [token for token, _ in part]
        if not spoken:
            engine.extend(session, tokens, machine.label_many(tokens))
            continue
        sampling = Sampling(len(tokens), constraint=Script(tokens, vocabulary))
        if list(engine.generate(session, sampling)) != tokens:
            raise RuntimeError(f"session {session} left its script")


def codes(row: TrainingRow) -> Iterator[tuple[str, list[int]]]:
    """Yield what has to be recalled: `source/kind`, and the places of its code's tokens."""
    places = range(len(row.ids))
    for label, group in groupby(places, key=lambda place: int(row.labels[place])):
        if label in EVIDENCE and LABELS[label].partition("/")[2] in KINDS:
            yield LABELS[label], list(group)


def judged(row: TrainingRow, best: Mapping[int, int]) -> dict[str, tuple[int, int]]:
    """Count the codes found and asked for."""
    right, asked = Counter[str](), Counter[str]()
    for name, places in codes(row):
        asked[name] += 1
        right[name] += all(best[place] == row.ids[place] for place in places)
    return {name: (right[name], asked[name]) for name in sorted(asked)}


def within(method: Method, seen: Guesses, session: str) -> tuple[int, int] | None:
    """Count the ring queries in the recency window over all events; None without rings."""
    if method.query_plan().kind is not QueryKind.PER_PHASE:
        return None
    points = seen.points.get(session, [])
    events: list[RingEvent] = ring_events(method, seen.phases[session], points)
    inside, held = ([event.within(WINDOW)[i] for event in events] for i in range(2))
    return sum(inside), sum(held)


def play_arm(
    model: str, profile: str, method: str, budget: int | None, seeds: list[int], at_once: int
) -> Iterator[Played]:
    """Play sessions of one arm."""
    made, seen, encoder = built(method, budget), Guesses(), RowEncoder(build_tokenizer())
    engine = start_engine(
        "embedded", EngineOptions(model, made, device="cpu", concurrency=at_once), seen
    )
    codec = TokenCodec(load_tokenizer(engine.info.model_path))
    table = PhaseTable.for_tokenizer(codec, closing=made.closing_markers)

    def one(seed: int) -> Played:
        row, name = episode_row(encoder, held_out_seed(seed), PROFILES[profile]), str(seed)
        force(engine, table, name, row)
        engine.close(name)
        events = len(seen.points.get(name, []))
        counts, overlap = judged(row, seen.best[name]), within(made, seen, name)
        return Played(profile, method, budget, seed, len(row.ids), events, counts, overlap)

    try:
        with ThreadPoolExecutor(at_once) as pool:
            yield from pool.map(one, seeds)
    finally:
        engine.shutdown()


def read(path: Path) -> list[Played]:
    """Read the file; none there is none played."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        plain: dict[str, Any] = json.loads(line)
        counts = {name: (pair[0], pair[1]) for name, pair in plain.pop("counts").items()}
        inside = plain.pop("within")
        found.append(Played(**plain, counts=counts, within=inside and (inside[0], inside[1])))
    return found


def play(options: argparse.Namespace) -> None:
    """Play what is missing, arm by arm, and append it."""
    done = {each.key for each in read(options.out)}
    budgets = options.budget or [1024]
    full = [("full", None)] if "full" in options.method else []
    arms = full + [(m, b) for b in budgets for m in options.method if m != "full"]
    wanted = range(options.first, options.first + options.sessions)
    for method, budget in arms:
        seeds = [s for s in wanted if (options.profile, method, budget, s) not in done]
        if not seeds:
            continue
        arm = (options.model, options.profile, method, budget, seeds, options.at_once)
        with options.out.open("a", encoding="utf-8") as file:
            for each in play_arm(*arm):
                file.write(json.dumps(asdict(each)) + "\n")
                file.flush()
        print(f"{options.profile} {method} {budget}: {len(seeds)} sessions", file=sys.stderr)


def scores(played: list[Played], names: tuple[str, ...]) -> Scores:
    """Return codes found out of those asked for, by session."""
    counts = {}
    for each in played:
        pairs = [each.counts.get(name, (0, 0)) for name in names]
        right, asked = sum(r for r, _ in pairs), sum(a for _, a in pairs)
        counts[str(each.seed)] = (float(right), float(asked))
    return Scores.of_counts(counts)


def share(found: Scores) -> str:
    """Write a share with its interval, in percent."""
    if not found.parts:
        return ""
    interval = level(found)
    return f"{100 * interval.point:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def table(profile: str, played: list[Played], sources: tuple[str, ...], base: str) -> str:
    """Return a Markdown table: arms by budget, evidence of the given sources."""
    names = {kind: tuple(f"{s}/{kind}" for s in sources) for kind in KINDS}
    every = names["recurring"] + names["one_shot"]
    lines = [
        f"| {profile}: budget | method | evidence, % [95 % CI] | recurring | one-shot "
        f"| less {base} [95 % CI] | p (Holm) | rings in the window, % | events | n |",
        "|--:|---|---|---|---|---|--:|--:|--:|--:|",
    ]
    for budget in sorted({each.budget for each in played}, key=lambda size: size or 0):
        arms: dict[str, list[Played]] = {}
        for each in played:
            if each.budget == budget:
                arms.setdefault(each.method, []).append(each)
        gaps = differences(arms, every, base)
        ordered = sorted(arms, key=lambda name: -level(scores(arms[name], every)).point)
        for method in ordered:
            arm, gap, p = arms[method], *gaps.get(method, (None, None))
            cells = [str(budget or ""), method, share(scores(arm, every))]
            cells += [share(scores(arm, names[kind])) for kind in KINDS]
            cells += [written(gap), "" if p is None else f"{p:.3f}", overlap(arm)]
            cells += [f"{np.mean([each.events for each in arm]):.1f}", str(len(arm))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(
    arms: Mapping[str, list[Played]], names: tuple[str, ...], base: str
) -> dict[str, tuple[Change, float]]:
    """Compare every arm with `base` on the sessions both have."""
    if base not in arms:
        return {}
    against = scores(arms[base], names)
    gaps = {m: change(scores(arm, names), against) for m, arm in arms.items() if m != base}
    known = {method: gap for method, gap in gaps.items() if gap is not None}
    adjusted = holm([gap.p_value for gap in known.values()])
    return {m: (gap, p) for (m, gap), p in zip(known.items(), adjusted, strict=True)}


def written(gap: Change | None) -> str:
    """Write a difference in points."""
    if gap is None:
        return ""
    return f"{100 * gap.point:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"


def overlap(arm: list[Played]) -> str:
    """Write the share of ring queries that lie in the recency window."""
    known = [each.within for each in arm if each.within is not None]
    held = sum(pair[1] for pair in known)
    return f"{100 * sum(pair[0] for pair in known) / held:.0f}" if held else ""


def tables(options: argparse.Namespace) -> None:
    """Print one table a profile."""
    played = read(options.out)
    for profile in dict.fromkeys(each.profile for each in played):
        chosen = [each for each in played if each.profile == profile]
        print(table(profile, chosen, tuple(options.source or SOURCES), options.base), end="\n\n")


def main() -> None:
    """Play, or print the tables of what was played."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    player, printer = verbs.add_parser("play"), verbs.add_parser("table")
    for verb in (player, printer):
        verb.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    player.set_defaults(do=play)
    player.add_argument("--model", default="micro")
    player.add_argument("--profile", choices=list(PROFILES), default="recall-4k-long")
    player.add_argument("--method", action="append", required=True, help="name or name:key=value")
    player.add_argument("--budget", type=int, action="append")
    player.add_argument("--sessions", type=int, default=12)
    player.add_argument("--first", type=int, default=0, help="held-out seed of the first")
    player.add_argument("--at-once", type=int, default=6)
    printer.set_defaults(do=tables)
    printer.add_argument("--base", default="agentkv")
    printer.add_argument("--source", action="append", choices=SOURCES, help="evidence that counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.do(options)


if __name__ == "__main__":
    main()
