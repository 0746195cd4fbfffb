"""Generate episodes: a depot agent stores items, reads pages and ships items, long after.

A fact is a *handle*, `<name><separator><code>`, as in `bag/timu`: the separator says where it was
first stated, the code is two of 64 syllables, so that it cannot be guessed.

Four sorts of facts have to be found again, each stated in one phase of the conversation:
rules and memos (`=`, `@`: others), results (`/`: tool), tags (`#`: act) and plans (`:`: think).
Tags and plans are made of two passing facts, the job code of the user's turn and the reading of the
last result. Those are named alike in every turn, so later text cannot say which ones they were:
a tag or a plan can only be read where it was written. In training some are random instead: whoever
makes them anew, instead of reading them, is then wrong.

In sessions with long turns every request names steps, and the agent spells them out in all of its
messages of that turn: a sentence for each in the thought, another in the call's note or the reply.
So the last tokens of the other phases lie far behind the next one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentbench_kv.adapters.micro.episode import (
    Episode,
    ExpectedCall,
    ExpectedReply,
    Kind,
    Slot,
    UserTurn,
)

# Left out: syllables that would merge with the words of the chat template when tokenised.
CLASHING = {"ge", "gi", "me", "ne", "ra", "te"}
SYLLABLES = tuple(c + v for c in "bdfghklmnprstv" for v in "aeiou" if c + v not in CLASHING)
_WORDS = """
bag ban bar bat bay bed bet bib bin bog bow box bud bug bun bus dab dam day den dew
dig dip dog dot dug fan fat fax fig fin fir fog fox fun fur gag gap gas god gum gun
gut ham hat hay hen hip hog hop hub hug hut kid kin kit lab lad lap law leg lid lip
lot mat map mop mud mug nap nib nod nun nut pad pan paw peg pen pet pig pin pit pod
pot pub pup rib rim rod rot rug rum run sap saw sax set sip sob sod son sum sun tab
tan tap tar tax tin tip top tub tug van vat vet vow
"""
NAMES = tuple(_WORDS.split())
# Separators by source: tool results, call arguments, conclusions, system rules, the user.
TOOL, ACT, THINK, RULE, MEMO = "/", "#", ":", "=", "@"
# Separators of passing facts: the user's job code of a turn, the readings of a tool result.
HINT, READING = "~", "+"
# One handle in any text: groups name, separator, code.
HANDLE = re.compile(rf"([a-z]+)([/#:=@~+])((?:{'|'.join(SYLLABLES)}){{2}})(?![a-z])")
# What the agent says of a step: in its thoughts, and in a call's note or a reply.
STEPS = {
    "weigh": ("I put {} on the scale and look at what it says.", "{} was weighed on the scale."),
    "seal": ("One seal goes on the lid of {} and one below.", "Two seals hold {} shut."),
    "count": ("Every part of {} is counted from left to right.", "No part of {} is missing."),
    "clean": ("First I wipe the dust off {} with a dry cloth.", "{} is free of dust."),
    "label": ("A blue label with a date comes on {} at last.", "{} has a blue label."),
    "wrap": ("I wrap {} into thick paper, twice around.", "Thick paper is around {}."),
    "photo": ("The camera takes a picture of {} from above.", "A picture of {} was taken."),
    "cool": ("It is warm, so {} has to rest in the cellar.", "{} rests in the cellar."),
    "stack": ("Under {} there must be a wooden board.", "A wooden board is under {}."),
    "inspect": ("I hold {} to the light and search for cracks.", "The light shows no crack in {}."),
    "queue": ("Who came before {} goes before it.", "Nobody waits ahead of {}."),
    "log": ("The book gets a new line about {} today.", "The book knows about {}."),
}
TEST_SEEDS = 1 << 32  # test seeds are below this number, training seeds from it on
Code = tuple[str, str]  # two syllables
Range = tuple[int, int]  # inclusive, that a count is drawn from


@dataclass(frozen=True)
class Handle:
    """A named fact, as `str` writes it in texts."""

    name: str  # what the fact is about
    separator: str  # where it was first stated
    code: Code

    def __str__(self) -> str:
        return self.name + self.separator + "".join(self.code)


def draw_code(rng: random.Random) -> Code:
    return rng.choice(SYLLABLES), rng.choice(SYLLABLES)


def held_out_seed(index: int) -> int:
    return index % TEST_SEEDS


def train_seed(index: int) -> int:
    return TEST_SEEDS + index


@dataclass(frozen=True)
class EpisodeProfile:
    """How long an episode is and how far apart its facts lie."""

    name: str  # part of the random state: equal seeds of two profiles are unrelated episodes
    stores: Range  # user turns of each sort
    ships: Range  # never more than stores
    reads: Range
    rules: Range  # handles in the system prompt's table
    memos: Range  # handles in the first user message
    scan_log: Range  # handles of noise in the results of the tools
    ship_log: Range
    read_log: Range
    tools: bool = True  # schemas in the system prompt; the shortest training rows have none
    steps: Range = (0, 0)  # that every request names


# Behind the tasks `micro/NAME`.
PROFILES = {
    "recall-1k": EpisodeProfile(
        "recall-1k", (2, 3), (2, 2), (0, 0), (2, 4), (2, 3), (1, 4), (0, 2), (4, 8)
    ),
    "recall-5k": EpisodeProfile(
        "recall-5k", (5, 6), (5, 5), (7, 8), (64, 76), (30, 38), (4, 14), (4, 12), (22, 32)
    ),
    "recall-4k-long": EpisodeProfile(
        "recall-4k-long",
        (2, 3),
        (2, 2),
        (0, 0),
        (2, 8),
        (2, 6),
        (8, 16),
        (8, 16),
        (0, 0),
        steps=(4, 5),
    ),
    # Of `micro/memory`: one item of all is shipped, long after.
    "memory": EpisodeProfile(
        "memory", (8, 10), (1, 1), (4, 6), (4, 8), (4, 8), (4, 14), (4, 12), (10, 20)
    ),
}
# Of the training stages, shortest first; the last asks for more than any task does.
CURRICULUM = (
    EpisodeProfile(
        "s0", (1, 2), (1, 1), (0, 1), (1, 3), (1, 3), (0, 1), (0, 1), (2, 3), tools=False
    ),
    EpisodeProfile("s1", (2, 4), (2, 3), (0, 1), (3, 8), (2, 6), (0, 4), (0, 3), (3, 8)),
    EpisodeProfile("s2", (3, 4), (2, 4), (0, 2), (4, 30), (2, 16), (2, 10), (0, 8), (4, 20)),
    EpisodeProfile("s3", (3, 6), (3, 5), (1, 4), (8, 80), (4, 40), (4, 20), (2, 16), (12, 30)),
    EpisodeProfile("s4", (6, 7), (6, 6), (4, 5), (78, 92), (36, 46), (4, 14), (4, 12), (18, 28)),
)
# Of the model with long turns, after these: single items, then whole sessions.
LONG_CURRICULUM = (
    EpisodeProfile(
        "l0", (1, 1), (1, 1), (0, 0), (1, 4), (1, 3), (1, 6), (1, 6), (0, 0), steps=(1, 4)
    ),
    EpisodeProfile(
        "l1", (1, 2), (1, 2), (0, 0), (2, 8), (2, 6), (6, 16), (6, 16), (0, 0), steps=(3, 5)
    ),
    EpisodeProfile(
        "l2", (2, 3), (2, 2), (0, 0), (2, 10), (2, 8), (8, 18), (8, 18), (0, 0), steps=(4, 5)
    ),
)
# Argument names of every tool, in the order they are written.
PARAMETERS = {
    "login": ("crew",),
    "scan": ("tag",),
    "open": ("route", "pass", "crew", "session"),
    "ship": ("plan", "gate", "port", "tag"),
    "read": ("page",),
}
PREAMBLE = (
    "You are a depot agent. Think, call one tool, then reply.\n"
    "To ship, open with route, pass, crew and session.\n"
    "Table:\n"
)


def schemas(names: Sequence[str], note: bool = False) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for name in names:
        arguments = ("note", *PARAMETERS[name]) if note else PARAMETERS[name]
        properties = {argument: {"type": "string"} for argument in arguments}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function})
    return tools


def generate(seed: int, profile: EpisodeProfile, invented: float = 0.0) -> Episode:
    """Generate the episode of a seed (see `held_out_seed` and `train_seed`).

    `invented` is the share of tags and plans drawn at random, for training only.
    """
    return _Depot(seed, profile, invented).episode()


class _Depot:
    def __init__(self, seed: int, profile: EpisodeProfile, invented: float) -> None:
        self.rng = random.Random(f"{profile.name}/{seed}")
        self.whims = random.Random(f"whims/{seed}")
        self.habits = random.Random(f"steps/{profile.name}/{seed}")
        self.invented = invented
        self.seed = seed
        self.profile = profile
        self.reading = self._fact("now", READING)
        # Handles by the name of the item they are about.
        self.plans: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.ports: dict[str, str] = {}
        self._cast()

    def _cast(self) -> None:
        count = self._draw(self.profile.stores)
        reads = self._draw(self.profile.reads)
        names = self.rng.sample(NAMES, len(NAMES))
        self.items, self.pages = names[:count], names[count : count + reads]
        self.extras = names[count + reads :]
        self.ships = self.rng.sample(self.items, min(count, self._draw(self.profile.ships)))
        self.by_badge = {item for item in self.ships if self.rng.random() < 0.5}
        gates = self.rng.sample(NAMES, max(len(self.ships), self._draw(self.profile.rules)))
        self.rules = {name: self._handle(name, RULE) for name in [*gates, "pass"]}
        self.gates = dict(zip(self.ships, gates, strict=False))
        others = max(0, self._draw(self.profile.memos) - len(self.by_badge))
        memos = [*sorted(self.by_badge), *self.rng.sample(self.extras, others)]
        self.memos = {name: self._handle(name, MEMO) for name in self._shuffled(memos)}

    def episode(self) -> Episode:
        write = {"store": self._store, "ship": self._ship, "read": self._read}
        turns = (self._begin(), *(write[verb](name) for verb, name in self._schedule()))
        if self.profile.steps[1]:
            turns = tuple(_spelled_out(turn, self._some_steps()) for turn in turns)
        table = "\n".join(self._shuffled(self.rules.values()))
        if not self.profile.tools:
            return Episode(self.seed, self.profile.name, table, [], turns)
        tools = ["login", "scan", "open", "ship", *(["read"] if self.profile.reads[1] else [])]
        return Episode(
            self.seed,
            self.profile.name,
            PREAMBLE + table,
            schemas(tools, bool(self.profile.steps[1])),
            turns,
        )

    def _schedule(self) -> list[tuple[str, str]]:
        """Order the requests: a ship comes anywhere after its store, more often late."""
        order = [("store", item) for item in self.items]
        for page in self.pages:
            order.insert(self.rng.randint(0, len(order)), ("read", page))
        for item in self.ships:
            first = order.index(("store", item)) + 1
            place = max(self.rng.randint(first, len(order)) for _ in range(2))
            order.insert(place, ("ship", item))
        return order

    def _some_steps(self) -> list[str]:
        # Of their own random state: with or without them the facts of a seed are the same.
        return self.habits.sample(list(STEPS), self.habits.randint(*self.profile.steps))

    def _begin(self) -> UserTurn:
        job = self._fact("job", HINT)
        memos = "".join(f"\n{memo}" for memo in self.memos.values())
        text = f'Please begin "{job}" at "{self.reading}".\nKeep:{memos}'
        self.crew, kind = self._tag("crew", job)
        crew = Slot("crew", self.crew, "act", kind)
        self.session = self._handle("sess", TOOL)
        result = self._result({"session": self.session}, self.profile.ship_log)
        call = ExpectedCall("login", "login", {"crew": self.crew}, result, (crew,))
        self.route, kind = self._plan("route", job)
        slots = (Slot("think", self.route, "think", kind), self._pass("reply"))
        reply = ExpectedReply(self.route, f'Ready with "{self.rules["pass"]}".', slots)
        return UserTurn(text, (call,), reply)

    def _store(self, item: str) -> UserTurn:
        job = self._fact("job", HINT)
        tag, kind = self._tag(item, job)
        slot = Slot("tag", tag, "act", kind)
        port = self._handle(item, TOOL)
        result = self._result({"port": port}, self.profile.scan_log)
        call = ExpectedCall(f'scan "{item}"', "scan", {"tag": tag}, result, (slot,))
        plan, kind = self._plan(item, job)
        reply = ExpectedReply(plan, "Stored.", (Slot("think", plan, "think", kind),))
        self.tags[item], self.ports[item], self.plans[item] = tag, port, plan
        return UserTurn(f'Please store "{item}" for "{job}".', (call,), reply, item)

    def _ship(self, item: str) -> UserTurn:
        if item in self.by_badge:
            gate, way = self.memos[item], "by badge"
        else:
            gate, way = self.rules[self.gates[item]], f'via "{self.gates[item]}"'
        calls = (self._open(), self._send(item, gate))
        # The slip of the last result, just above the reply.
        slip = calls[1].result["slip"]
        reply = ExpectedReply(None, f'Shipped "{slip}".', (Slot("reply", slip, "tool", "local"),))
        return UserTurn(f'Please ship "{item}" {way}.', calls, reply, item)

    def _open(self) -> ExpectedCall:
        route, rule, crew, session = self.route, self.rules["pass"], self.crew, self.session
        slots = (
            Slot("think", route, "think", "recurring"),
            self._pass("think"),
            Slot("route", route, "think", "recurring", copied=True),
            self._pass("pass", copied=True),
            Slot("crew", crew, "act", "recurring"),
            Slot("session", session, "tool", "recurring"),
        )
        arguments = {"route": route, "pass": rule, "crew": crew, "session": session}
        result = self._result({"door": self._handle("door", READING)}, self.profile.ship_log)
        return ExpectedCall(f"{route}\n{rule}", "open", arguments, result, slots)

    def _send(self, item: str, gate: str) -> ExpectedCall:
        plan, port, tag = self.plans[item], self.ports[item], self.tags[item]
        slots = (
            Slot("think", plan, "think", "one_shot"),
            Slot("plan", plan, "think", "one_shot", copied=True),
            Slot("gate", gate, "others", "one_shot"),
            Slot("port", port, "tool", "one_shot"),
            Slot("tag", tag, "act", "one_shot"),
        )
        arguments = {"plan": plan, "gate": gate, "port": port, "tag": tag}
        result = self._result({"slip": self._handle(item, READING)}, self.profile.ship_log)
        return ExpectedCall(plan, "ship", arguments, result, slots)

    def _read(self, page: str) -> UserTurn:
        entry = self._handle(page, READING)
        mark = {"page": self._handle("page", READING)}
        result = self._result(mark, self.profile.read_log, entry)
        call = ExpectedCall(f'read "{page}"', "read", {"page": page}, result, ())
        slots = (
            Slot("think", entry, "tool", "local"),
            Slot("reply", entry, "tool", "local", copied=True),
        )
        reply = ExpectedReply(entry, f'Read "{entry}".', slots)
        return UserTurn(f'Please read "{page}".', (call,), reply)

    def _result(
        self, fields: dict[str, str], log: Range, entry: str | None = None
    ) -> dict[str, str]:
        """Fill a tool's answer: its subject, a log of noise (with `entry` in it), a new reading."""
        names = self.rng.sample(self.extras, max(1, self._draw(log)))
        noise = [self._handle(name, self.rng.choice((TOOL, READING))) for name in names]
        if entry:
            noise[self.rng.randrange(len(noise))] = entry
        self.reading = self._fact("now", READING)
        return {**fields, "log": ",".join(noise), "now": str(self.reading)}

    def _tag(self, name: str, job: Handle) -> tuple[str, Kind]:
        return self._mixed(name, ACT, (self.reading.code[0], job.code[1]))

    def _plan(self, name: str, job: Handle) -> tuple[str, Kind]:
        return self._mixed(name, THINK, (job.code[0], self.reading.code[1]))

    def _mixed(self, name: str, separator: str, code: Code) -> tuple[str, Kind]:
        if self.whims.random() < self.invented:
            return str(Handle(name, separator, draw_code(self.whims))), "invented"
        return str(Handle(name, separator, code)), "derived"

    def _pass(self, where: str, copied: bool = False) -> Slot:
        return Slot(where, self.rules["pass"], "others", "recurring", copied)

    def _fact(self, name: str, separator: str) -> Handle:
        return Handle(name, separator, draw_code(self.rng))

    def _handle(self, name: str, separator: str) -> str:
        return str(self._fact(name, separator))

    def _draw(self, span: Range) -> int:
        return self.rng.randint(*span)

    def _shuffled(self, things: Iterable[str]) -> list[str]:
        listed = list(things)
        return self.rng.sample(listed, len(listed))


def _spelled_out(turn: UserTurn, steps: Sequence[str]) -> UserTurn:
    """Let a request name steps, and the agent say each of them in all messages of the turn."""
    subject = turn.subject or "it"
    thought, note = (" ".join(STEPS[s][i].format(subject) for s in steps) for i in range(2))
    calls = tuple(
        replace(call, think=f"{thought}\n{call.think}", arguments={"note": note, **call.arguments})
        for call in turn.calls
    )
    think = None if turn.reply.think is None else f"{thought}\n{turn.reply.think}"
    reply = replace(turn.reply, think=think, text=f"{turn.reply.text} {note}")
    return replace(turn, text=f"{turn.text}\nSteps: {', '.join(steps)}", calls=calls, reply=reply)
