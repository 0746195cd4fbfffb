"""Rewound sessions: each goes on as a fresh one with the tokens that stayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import Driver, TurnPlan, plain_phases, settled
from agentbench_kv.conformance.engines.fixture import prompt
from agentbench_kv.engines.base import Capability, Sampling
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.phases import TokenPhases

_FIRST, _ANSWER, _PENDING = 300, 45, 12  # tokens
# How many tokens go, the last `_PENDING` of them being new and not fed yet; and how many stay.
_BACK = {
    "nothing": 0,
    "half of what is pending": 5,
    "what was never fed": _PENDING + 1,
    "half of the answer": _PENDING + 25,
}
_TO = {"inside the prompt": 130, "everything": 0}
_numbers = count()


def check_rewinds(driver: Driver, reference: Driver) -> CheckResult:
    """Check sessions that go back to several lengths; refused where a method keeps more than rows.

    Every answer is compared with the reference's in a fresh session of the same tokens.
    """
    name = "a rewound session is a fresh one of what stayed"
    if Capability.REWIND not in driver.engine.info.capabilities:
        return CheckResult(name, True, "the engine does not rewind", skipped=True)
    if driver.method.compresses:
        return CheckResult.unless(_unrefused(driver), "a rewind is refused")
    session = _Rewound(driver)
    with session.opened():
        problem = session.turn("first", prompt(_FIRST, 31)) or session.refusals()
        for number, (what, back) in enumerate(_BACK.items()):
            session.feed(prompt(_PENDING, 40 + number))
            problem = problem or session.go_back(what, len(session.tokens) - back)
        for what, length in _TO.items():
            problem = problem or session.go_back(what, length)
    problem = problem or _fork_problem(driver, session) or _cancelled_problem(driver, session)
    asked = {what: [TurnPlan(tokens, _ANSWER)] for what, tokens, _ in session.answers}
    expected = reference.play(asked)
    wrong = [what for what, _, answer in session.answers if expected[what].turns[0] != answer]
    problem = problem or (f"{wrong[0]}: other tokens" if wrong else "")
    problem = problem or _evicted_problem(driver, reference, session) or _leak(driver)
    return CheckResult.unless(problem, name, f"{len(session.answers)} answers{session.note}")


def _unrefused(driver: Driver) -> str:
    session = _Rewound(driver)
    with session.opened():
        session.answer(prompt(60, 30))
        try:
            driver.engine.rewind(session.name, 40)
        except UsageError:
            return ""
    return f"a session of {driver.method.label} was rewound"


class _Rewound:
    """A session, the tokens it has by the contract, and what it has answered."""

    def __init__(self, driver: Driver) -> None:
        self.engine, self.shipped = driver.engine, driver.method.name == "full"
        self.name = f"rewound-{next(_numbers)}"
        self.tokens: list[int] = []
        self.fed = 0  # how many of them the model has seen
        self.drawn = 0  # 1 if the next one after these was generated
        self.prefilled = self.decoded = 0
        self.answers: list[tuple[str, list[int], list[int]]] = []  # what, tokens before, answer
        self.note = ""

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.engine.open(self.name, TokenPhases())
        try:
            yield
        finally:
            self.engine.close(self.name)

    def feed(self, tokens: Sequence[int]) -> None:
        self.engine.extend(self.name, tokens, plain_phases(tokens))
        self.tokens += tokens

    def answer(self, tokens: Sequence[int]) -> list[int]:
        self.feed(tokens)
        return list(self.engine.generate(self.name, Sampling(_ANSWER)))

    def turn(self, what: str, tokens: Sequence[int]) -> str:
        """Feed and generate; return what is wrong with the accounting."""
        answer = self.answer(tokens)
        self.answers.append((what, self.tokens.copy(), answer))
        self.prefilled += len(self.tokens) - self.fed - self.drawn
        self.decoded += len(answer)
        self.tokens += answer
        self.fed, self.drawn = len(self.tokens) - 1, 1
        return self._account(what)

    def go_back(self, what: str, length: int) -> str:
        """Rewind and go on; return what is wrong with the accounting."""
        self.engine.rewind(self.name, length)
        del self.tokens[length:]
        self.fed, self.drawn = min(self.fed, length), self.drawn * (length > self.fed)
        return self._account(what) or self.turn(what, prompt(20, 50 + len(self.answers)))

    def refusals(self) -> str:
        for length in (-1, len(self.tokens) + 1):
            try:
                self.engine.rewind(self.name, length)
            except UsageError:
                continue
            return f"{len(self.tokens)} tokens were rewound to {length}"
        return ""

    def _account(self, what: str) -> str:
        stats = self.engine.stats(self.name)
        found = (stats.logical, stats.live, stats.prefill_tokens, stats.decode_tokens)
        wanted = (len(self.tokens), self.fed, self.prefilled, self.decoded)
        if found != wanted:
            names = "logical, live, prefill_tokens, decode_tokens"
            return f"{what}: {names} {found}, expected {wanted}"
        # As shipped, an engine's prefix cache may keep whole blocks only.
        lost = 0 if self.shipped else stats.recomputed
        if stats.evicted or stats.events or lost:
            return f"{what}: {stats.evicted} evicted, {lost} computed again"
        return ""


def _fork_problem(driver: Driver, whole: _Rewound) -> str:
    """Rewind a session that has a fork; the fork's answer, and its own, join those of `whole`."""
    if Capability.FORK not in driver.engine.info.capabilities:
        return ""
    source, fork = _Rewound(driver), _Rewound(driver)
    with source.opened():
        problem = source.turn("forked", prompt(_FIRST, 32))
        try:
            driver.engine.fork(source.name, fork.name, TokenPhases())
        except KVBenchError:  # not with this method
            return problem
        fork.tokens = source.tokens.copy()
        try:
            try:
                problem = problem or source.go_back("beside a fork", 200)
            except KVBenchError:
                whole.note = ", none beside a fork"
            before = [*fork.tokens, *prompt(20, 33)]
            whole.answers.append(("a fork", before, fork.answer(prompt(20, 33))))
        finally:
            driver.engine.close(fork.name)
    whole.answers += source.answers
    return problem


def _cancelled_problem(driver: Driver, whole: _Rewound) -> str:
    """Go back within an answer that its client had enough of; what was counted may be more."""
    session = _Rewound(driver)
    with session.opened():
        session.feed(prompt(_FIRST, 35))
        generation = driver.engine.generate(session.name, Sampling(400))
        for number, token in enumerate(generation):
            session.tokens.append(token)
            if number == 5:
                generation.cancel()
        del session.tokens[-4:]
        driver.engine.rewind(session.name, len(session.tokens))
        before = [*session.tokens, *prompt(20, 36)]
        whole.answers.append(("a cancelled answer", before, session.answer(prompt(20, 36))))
        stats, wanted = driver.engine.stats(session.name), len(before) + _ANSWER
    right = (stats.logical, stats.live) == (wanted, wanted - 1)
    return "" if right else f"a cancelled answer: {stats.logical} tokens, expected {wanted}"


def _evicted_problem(driver: Driver, reference: Driver, whole: _Rewound) -> str:
    """Compare sessions that go back to where tokens were evicted, on both engines."""
    if Capability.EVICT_SPANS not in driver.engine.info.capabilities:
        return ""
    try:
        found = _back_to_evicted(driver)
    except UsageError:  # not with this method
        return ""
    wanted = _back_to_evicted(reference)
    whole.note += f", {len(found)} behind evicted tokens"
    return "" if found == wanted else "evicted tokens: another answer or account than embedded's"


def _back_to_evicted(driver: Driver) -> list[tuple[list[int], int, int]]:
    """Return answers, live tokens and evicted ones of a session that goes back three times."""
    session, engine, found = _Rewound(driver), driver.engine, []
    with session.opened():
        session.answer(prompt(_FIRST, 34))
        # To within the evicted, behind it, and to where the last token is the evicted one.
        for spans, length in (([(40, 60), (200, 260)], 250), ([(230, 270)], 280), ([(60, 90)], 90)):
            engine.evict_spans(session.name, spans)
            engine.rewind(session.name, length)
            answer = session.answer(prompt(30, length))
            stats = engine.stats(session.name)
            found.append((answer, stats.live, stats.evicted))
    return found


def _leak(driver: Driver) -> str:
    before = driver.pool_at_start
    after = before and settled(driver.engine, before)
    return f"{after} behind it, {before} at the start" if after != before else ""
