"""Generate episodes: a depot agent stores items, reads pages and ships items, long after.

Four sorts of facts have to be found again, each stated in one phase of the conversation:
rules and memos (`=`, `@`: others), results (`/`: tool), tags (`#`: act) and plans (`:`: think).
Tags and plans are made of two passing facts, the job code of the user's turn and the reading of the
last result. Those are named alike in every turn, so later text cannot say which ones they were:
a tag or a plan can only be read where it was written. In training some are random instead: whoever
makes them anew, instead of reading them, is then wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from agentbench_kv.adapters.micro.episode import Call, Episode, Kind, Reply, Slot, UserTurn
from agentbench_kv.adapters.micro.profiles import Profile, Span
from agentbench_kv.adapters.micro.tools import schemas
from agentbench_kv.adapters.micro.words import (
    ACT,
    HINT,
    MEMO,
    NAMES,
    READING,
    RULE,
    THINK,
    TOOL,
    Code,
    Handle,
    draw_code,
)

PREAMBLE = (
    "You are a depot agent. Think, call one tool, then reply.\n"
    "To ship, open with route, pass, crew and session.\n"
    "Table:\n"
)


def generate(seed: int, profile: Profile, invented: float = 0.0) -> Episode:
    """Generate the episode of a seed (see `profiles.held_out_seed` and `train_seed`).

    `invented` is the share of tags and plans drawn at random, for training only.
    """
    return _Depot(seed, profile, invented).episode()


class _Depot:
    def __init__(self, seed: int, profile: Profile, invented: float) -> None:
        self.rng = random.Random(f"{profile.name}/{seed}")
        self.whims = random.Random(f"whims/{seed}")
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
        """Draw who plays: items, pages, the table of rules, the user's memos."""
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
        table = "\n".join(self._shuffled(self.rules.values()))
        if not self.profile.tools:
            return Episode(self.seed, self.profile.name, table, [], turns)
        tools = ["login", "scan", "open", "ship", *(["read"] if self.profile.reads[1] else [])]
        return Episode(self.seed, self.profile.name, PREAMBLE + table, schemas(tools), turns)

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

    def _begin(self) -> UserTurn:
        job = self._fact("job", HINT)
        memos = "".join(f"\n{memo}" for memo in self.memos.values())
        text = f'Please begin "{job}" at "{self.reading}".\nKeep:{memos}'
        self.crew, kind = self._tag("crew", job)
        crew = Slot("crew", self.crew, "act", kind)
        self.session = self._handle("sess", TOOL)
        result = self._result({"session": self.session}, self.profile.ship_log)
        call = Call("login", "login", {"crew": self.crew}, result, (crew,))
        self.route, kind = self._plan("route", job)
        slots = (Slot("think", self.route, "think", kind), self._pass("reply"))
        reply = Reply(self.route, f'Ready with "{self.rules["pass"]}".', slots)
        return UserTurn(text, (call,), reply)

    def _store(self, item: str) -> UserTurn:
        job = self._fact("job", HINT)
        tag, kind = self._tag(item, job)
        slot = Slot("tag", tag, "act", kind)
        port = self._handle(item, TOOL)
        result = self._result({"port": port}, self.profile.scan_log)
        call = Call(f'scan "{item}"', "scan", {"tag": tag}, result, (slot,))
        plan, kind = self._plan(item, job)
        reply = Reply(plan, "Stored.", (Slot("think", plan, "think", kind),))
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
        reply = Reply(None, f'Shipped "{slip}".', (Slot("reply", slip, "tool", "local"),))
        return UserTurn(f'Please ship "{item}" {way}.', calls, reply, item)

    def _open(self) -> Call:
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
        return Call(f"{route}\n{rule}", "open", arguments, result, slots)

    def _send(self, item: str, gate: str) -> Call:
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
        return Call(plan, "ship", arguments, result, slots)

    def _read(self, page: str) -> UserTurn:
        entry = self._handle(page, READING)
        mark = {"page": self._handle("page", READING)}
        result = self._result(mark, self.profile.read_log, entry)
        call = Call(f'read "{page}"', "read", {"page": page}, result, ())
        slots = (
            Slot("think", entry, "tool", "local"),
            Slot("reply", entry, "tool", "local", copied=True),
        )
        reply = Reply(entry, f'Read "{entry}".', slots)
        return UserTurn(f'Please read "{page}".', (call,), reply)

    def _result(
        self, fields: dict[str, str], log: Span, entry: str | None = None
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

    def _draw(self, span: Span) -> int:
        return self.rng.randint(*span)

    def _shuffled(self, things: Iterable[str]) -> list[str]:
        listed = list(things)
        return self.rng.sample(listed, len(listed))
