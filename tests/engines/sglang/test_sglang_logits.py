"""Spans and forks by the logits themselves, as the running SGLang computes them.

Evictions are compared with a Hugging Face model in float32 that keeps everything and masks what is
gone; forks with the same session without any, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_logits import Row, rows, written_down

from agentbench_kv.analysis.traces import CacheEvent
from agentbench_kv.conformance.driver import SessionTrace
from agentbench_kv.conformance.engines.fixture import load_network, prompt, write_model
from agentbench_kv.conformance.reference import largest_difference
from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.sglang.engine import SglangEngine
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

pytestmark = pytest.mark.engine

TOLERANCE = {"qwen3": 1e-4, "llama": 1e-3}
"""On logits of up to 15; a span that is off by one token costs 0.04 and more.

A random Llama, which has no norms on queries and keys, amplifies rounding: Hugging Face's own
float32 is up to 3e-4 away from its float64, and as far from SGLang where nothing was evicted.
"""

Spans = Sequence[SpanRange]

TURNS = ((203, 20), (60, 30), (40, 30))
EVICTIONS: tuple[Spans, ...] = (
    [(10, 45), (64, 80), (100, 131), (160, 161)],
    [(3, 9), (120, 140), (215, 232), (250, 287)],
)
"""Before the second and the third turn: across and along pages, one token, some gone already."""


@dataclass(frozen=True)
class Subject:
    """A server whose logits are written down, and the plain model."""

    engine: SglangEngine
    network: Any
    folder: Path
    page: int

    @property
    def tolerance(self) -> float:
        """The largest difference of logits that may be rounding."""
        return TOLERANCE[self.network.config.model_type]

    def turn(self, name: str, ids: Sequence[int], out: int) -> list[int]:
        """Play one turn; return what was generated."""
        self.engine.extend(name, ids, [TokenPhases().label(token) for token in ids])
        return list(self.engine.generate(name, Sampling(out)))

    def rows(self, name: str) -> list[Row]:
        """Return the logits of an open session, in order."""
        return rows(self.folder, self.engine.kept_names(name))

    def close(self, *names: str) -> None:
        """Close sessions, after which no row may be left."""
        for name in names:
            self.engine.close(name)
        pool = self.engine.pool()
        assert pool["free_blocks"] == pool["total_blocks"]


@pytest.fixture(
    scope="module",
    params=[("qwen3", 1), ("qwen3", 16), ("llama", 1), ("llama", 16)],
    ids=lambda param: f"{param[0]}-pages-of-{param[1]}",
)
def subject(
    request: pytest.FixtureRequest,
    sglang_python: Path,  # noqa: ARG001
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    family, page = request.param
    folder = tmp_path_factory.mktemp("logits")
    model = write_model(tmp_path_factory.mktemp("model") / family, family)
    options = EngineOptions(
        str(model),
        make_method("full-constrained", None),
        device="cpu",
        max_live_tokens=4096,
        engine_args={"page-size": str(page), "chunked-prefill-size": "128"},
    )
    with written_down(folder):
        engine = SglangEngine.create(options)
        yield Subject(engine, load_network(model), folder, page)
        engine.shutdown()


def trace_of(
    tokens: Sequence[Sequence[int]], evictions: Sequence[Spans], shape: Any
) -> SessionTrace:
    """Return what the reference needs to know of a session.

    Parameters
    ----------
    tokens : sequence of sequences
        Prompt, answer, prompt, answer, ...
    evictions : sequence of spans
        Before every turn but the first.
    shape : transformers config
    """
    trace, gone = SessionTrace(), set[int]()
    for number, ids in enumerate(tokens):
        if number and number % 2 == 0:
            gone |= {at for span in evictions[number // 2 - 1] for at in range(*span)}
            # The last token of an answer is fed with the next prompt.
            fed = len(trace.tokens) - 1
            kept = torch.tensor([at for at in range(fed) if at not in gone])
            everywhere = kept.expand(shape.num_hidden_layers, shape.num_key_value_heads, -1)
            trace.events.append(CacheEvent(fed, everywhere))
        trace.add(ids, decoded=number % 2 == 1)
    return trace


def shifted(evictions: Sequence[Spans]) -> Iterator[list[Spans]]:
    """Yield evictions with one end of one span moved by one token, all there are."""
    for turn, spans in enumerate(evictions):
        for number, (start, end) in enumerate(spans):
            for wrong in ((start - 1, end), (start + 1, end), (start, end - 1), (start, end + 1)):
                other = [*spans[:number], wrong, *spans[number + 1 :]]
                yield [*evictions[:turn], other, *evictions[turn + 1 :]]


@contextmanager
def company(subject: Subject, name: str, ids: Sequence[int]) -> Iterator[None]:
    """Let an open session generate for as long as the block takes, from its first token on."""
    labels = [TokenPhases().label(token) for token in ids]
    subject.engine.extend(name, ids, labels)
    generation = subject.engine.generate(name, Sampling(1700))
    first = threading.Event()

    def read() -> None:
        for _ in generation:
            first.set()

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        try:
            assert first.wait(60)
            yield
        finally:
            generation.cancel()
        reading.result()


def evicted(subject: Subject) -> tuple[list[Sequence[int]], SessionTrace]:
    """Play a session with evictions between its turns; return its ids, and what it logged."""
    engine, tokens, removed = subject.engine, list[Sequence[int]](), []
    engine.open("spans", TokenPhases())
    for number, (length, out) in enumerate(TURNS):
        if number:
            removed.append(engine.evict_spans("spans", EVICTIONS[number - 1]))
        tokens.append(prompt(length, number))
        tokens.append(subject.turn("spans", tokens[-1], out))
    found = subject.rows("spans")
    engine.close("spans")
    assert removed == [83, 69]
    trace = trace_of(tokens, EVICTIONS, subject.network.config)
    asked = set(trace.decoded_at)
    trace.logits = {row.position: row.logits for row in found if row.position in asked}
    assert trace.logits.keys() == asked
    return tokens, trace


def test_evicted_spans_leave_the_logits_of_a_masked_full_cache(subject: Subject) -> None:
    tokens, trace = evicted(subject)
    subject.close()
    assert largest_difference(subject.network, trace) <= subject.tolerance
    wrong = []
    for other in shifted(EVICTIONS):
        blind = trace_of(tokens, other, subject.network.config)
        blind.logits = trace.logits
        if not same_rows(trace, blind):
            wrong.append(largest_difference(subject.network, blind))
    assert len(wrong) >= 25
    assert min(wrong) > 10 * subject.tolerance


def test_spans_may_go_while_another_session_generates(subject: Subject) -> None:
    subject.engine.open("company", TokenPhases())
    with company(subject, "company", prompt(77, 50)):
        _, trace = evicted(subject)
    beside = {row.place[0] for row in subject.rows("company")}
    subject.close("company")
    assert 2 in beside
    assert largest_difference(subject.network, trace) <= subject.tolerance


def same_rows(one: SessionTrace, other: SessionTrace) -> bool:
    """Return whether two traces evict the same tokens."""
    pairs = zip(one.events, other.events, strict=True)
    return all(torch.equal(first.kept, second.kept) for first, second in pairs)


def played(subject: Subject, name: str, fork: str | None) -> list[Row]:
    """Play a session of three turns, in whose pauses a fork may play; return its logits."""
    engine = subject.engine
    engine.open(name, TokenPhases())
    for number, (length, out) in enumerate(TURNS):
        subject.turn(name, prompt(length, number), out)
        if fork is not None and number == 0:
            engine.fork(name, fork, TokenPhases())
        if fork is not None:
            subject.turn(fork, prompt(25, 60 + number), 40)
    return subject.rows(name)


def assert_bit_for_bit(found: Sequence[Row], expected: Sequence[Row]) -> None:
    """Compare forwards one by one: what they predict, in which batch, and every bit of it."""
    assert [row.position for row in found] == [row.position for row in expected]
    assert [row.place for row in found] == [row.place for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.logits.view(torch.int32), other.logits.view(torch.int32))


def test_a_fork_in_the_pauses_changes_no_bit(subject: Subject) -> None:
    expected = played(subject, "alone", None)
    subject.close("alone")
    found = played(subject, "main", "fork")
    forked = subject.rows("fork")
    subject.close("fork", "main")
    assert len(found) >= sum(out for _, out in TURNS)
    assert_bit_for_bit(found, expected)
    # The fork, too, is what a session is that computed the shared rows itself.
    subject.engine.open("twin", TokenPhases())
    subject.turn("twin", prompt(TURNS[0][0], 0), TURNS[0][1])
    before = len(subject.rows("twin"))
    for number in range(len(TURNS)):
        subject.turn("twin", prompt(25, 60 + number), 40)
    twin = subject.rows("twin")[before:]
    subject.close("twin")
    assert_bit_for_bit(forked, twin)


def beside(subject: Subject, *, fork: bool) -> list[Row]:
    """Return a session's logits while its fork generates, or a session that shares nothing."""
    engine, (length, out) = subject.engine, TURNS[0]
    first = prompt(length, 0)
    engine.open("main", TokenPhases())
    answer = subject.turn("main", first, out)
    if fork:
        engine.fork("main", "aside", TokenPhases())
    else:
        engine.open("aside", TokenPhases())
        assert subject.turn("aside", first, out) == answer
    with company(subject, "aside", prompt(25, 70)):
        for number, (length, out) in enumerate(TURNS[1:], 1):
            subject.turn("main", prompt(length, number), out)
    found = subject.rows("main")
    subject.close("main", "aside")
    return found


def test_a_fork_in_the_same_batch_changes_no_bit(subject: Subject) -> None:
    found = beside(subject, fork=True)
    assert_bit_for_bit(found, beside(subject, fork=False))
    both = [row for row in found if row.place[0] == 2]
    assert len(both) >= sum(out for _, out in TURNS[1:]) - len(TURNS[1:])
    # Another batch is another sum in another order: nothing a fork does, but it is seen.
    alone = {row.position: row.logits for row in played(subject, "alone", None)}
    subject.close("alone")
    largest = max(float((row.logits - alone[row.position]).abs().max()) for row in found)
    assert largest <= subject.tolerance


@pytest.mark.parametrize("rows_at_rest", [208, 215])
def test_a_fork_copies_at_most_part_of_a_page(subject: Subject, rows_at_rest: int) -> None:
    engine = subject.engine
    engine.open("main", TokenPhases())
    subject.turn("main", prompt(rows_at_rest - 11, 1), 12)
    before = engine.pool()
    engine.fork("main", "fork", TokenPhases())
    after = engine.pool()
    copied = rows_at_rest % subject.page
    assert after["fork_copied"] - before["fork_copied"] == copied
    assert after["fork_shared"] - before["fork_shared"] == rows_at_rest - copied
    assert before["free_blocks"] - after["free_blocks"] == (1 if copied else 0)
    subject.close("main", "fork")


@pytest.mark.parametrize("length", [300, 96, 90, 3])
def test_a_rewind_frees_whole_pages(length: int, subject: Subject) -> None:
    engine = subject.engine
    engine.open("main", TokenPhases())
    subject.turn("main", prompt(300, 1), 12)
    before = engine.pool()["free_blocks"]
    engine.rewind("main", length)
    freed = -(-311 // subject.page) - -(-length // subject.page)
    assert engine.pool()["free_blocks"] - before == freed
    answer = subject.turn("main", prompt(20, 2), 30)
    engine.open("twin", TokenPhases())
    assert subject.turn("twin", (*prompt(300, 1)[:length], *prompt(20, 2)), 30) == answer
    subject.close("main", "twin")


def test_a_session_that_shares_rows_is_not_rewound(subject: Subject) -> None:
    engine = subject.engine
    engine.open("main", TokenPhases())
    subject.turn("main", prompt(100, 1), 12)
    engine.fork("main", "fork", TokenPhases())
    for name in ("main", "fork"):
        with pytest.raises(KVBenchError, match="shares rows with"):
            engine.rewind(name, 50)
    assert engine.stats("main").logical == 112
    engine.rewind("main", 112)  # nothing goes
    engine.close("fork")
    engine.rewind("main", 50)
    assert engine.stats("main").live == 50
    subject.close("main")
