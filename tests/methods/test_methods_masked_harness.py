"""The masked-cache harness must be able to fail: broken traces and broken engines are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentbench_kv.conformance.driver import drive, short_turns
from agentbench_kv.conformance.masked import check_trace
from agentbench_kv.conformance.reference import largest_difference, tiny_model
from agentbench_kv.engines.embedded import scheduler
from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.errors import KVBenchError
from agentbench_kv.kernels import active_backend
from agentbench_kv.methods.base import Schedule
from agentbench_kv.registry import make_method


@pytest.fixture(scope="module")
def recorded():
    model = tiny_model("qwen3", kv_heads=2, layers=2)
    method = replace(make_method("agentkv", 48), interval=32)
    return model, method, drive(model, method, {"only": short_turns()})["only"]


def changed(trace, number, **changes):
    events = list(trace.events)
    events[number] = replace(events[number], **changes)
    return replace(trace, events=events)


def failures(model, method, trace):
    return {
        r.name.removeprefix("only: ") for r in check_trace("only", model, method, trace) if not r.ok
    }


def test_recorded_trace_passes(recorded):
    assert failures(*recorded) == set()


def test_harness_reports_one_wrong_position_in_one_head(recorded):
    """One kept token of one head of the last layer exchanged for an evicted one."""
    model, _, trace = recorded
    event = trace.events[0]
    kept = event.kept.clone()
    evicted = set(range(event.logical)) - set(kept[1, 0].tolist())
    kept[1, 0, 5] = max(evicted)
    assert largest_difference(model, changed(trace, 0, kept=kept)) > 1e-3


@pytest.mark.parametrize("shift", [-1, 1])
def test_harness_reports_an_event_that_is_off_by_one_token(recorded, shift):
    model, method, trace = recorded
    event = trace.events[0]
    wrong = changed(trace, 0, logical=event.logical + shift)
    assert largest_difference(model, wrong) > 1e-3
    assert "accounting" in failures(model, method, wrong)


@pytest.mark.parametrize("shift", [-1, 1])
def test_harness_reports_shifted_positions(recorded, shift):
    model, _, trace = recorded
    kept = (trace.events[2].kept + shift).clamp(0, trace.events[2].logical - 1)
    assert largest_difference(model, changed(trace, 2, kept=kept)) > 1e-3


def test_harness_reports_a_missing_event(recorded):
    model, method, trace = recorded
    wrong = replace(trace, events=trace.events[:-1])
    assert largest_difference(model, wrong) > 1e-3
    assert "accounting" in failures(model, method, wrong)


@pytest.mark.parametrize("trigger", ["every", "slack", "turn", "prefill+every"])
def test_harness_finds_events_that_come_late(recorded, monkeypatch, trigger):
    """Late, or never: tokens, kept sets and accounting agree with each other all along."""
    model, method, _ = recorded
    method = replace(method, trigger=trigger)

    def run():
        return failures(model, method, drive(model, method, {"only": short_turns()})["only"])

    assert run() == set()
    over = Schedule._over
    monkeypatch.setattr(Schedule, "_over", lambda self, live, *rest: over(self, live - 1, *rest))
    if trigger == "prefill+every":
        monkeypatch.setattr(Schedule, "after_prefill", lambda *_: False)
    if trigger == "every":
        monkeypatch.setattr(Schedule, "__init__", late(Schedule.__init__))
    if trigger == "turn":
        monkeypatch.setattr(Schedule, "after_turn", lambda *_: False)
    assert "events" in run()


def late(plain):
    def begin(self, *given):
        plain(self, *given)
        self._since_due = -1

    return begin


def test_harness_reports_heads_that_are_swapped(recorded):
    model, _, trace = recorded
    wrong = changed(trace, 1, kept=trace.events[1].kept.flip(1))
    assert largest_difference(model, wrong) > 1e-3


def test_harness_reports_impossible_kept_sets(recorded):
    model, method, trace = recorded
    event = trace.events[1]
    twice = event.kept.clone()
    twice[0, 0, 0] = twice[0, 0, 1]
    back = event.kept.clone()
    gone = set(range(trace.events[0].logical)) - set(trace.events[0].kept[0, 0].tolist())
    back[0, 0, 0] = min(gone)
    future = event.kept.clone()
    future[0, 0, 0] = event.logical
    for kept in (twice, back, future, event.kept[..., :-1]):
        assert "kept sets" in failures(model, method, changed(trace, 1, kept=kept))


def test_harness_reports_lost_logits_and_too_few_events(recorded):
    model, method, trace = recorded
    fewer = dict(list(trace.logits.items())[:-1])
    assert "logits recorded" in failures(model, method, replace(trace, logits=fewer))
    names_of = {r.name for r in check_trace("only", model, method, trace, 99) if not r.ok}
    assert names_of == {"only: events"}


def equality_fails(model, method):
    trace = drive(model, method, {"only": short_turns()})["only"]
    return "masked-cache equality" in failures(model, method, trace)


def test_harness_finds_an_engine_that_loses_positions(recorded, monkeypatch):
    """Physical length in the place of logical position after an eviction."""
    model, method, _ = recorded
    plain = SessionCache.advance

    def physical(self, _first_position, rows):
        plain(self, self.length, rows)

    monkeypatch.setattr(SessionCache, "advance", physical)
    trace = drive(model, method, {"only": short_turns()})["only"]
    assert failures(model, method, trace) & {"masked-cache equality", "kept sets"}


@pytest.mark.parametrize("lost", ["keys", "values"])
def test_harness_finds_a_compaction_that_leaves_rows_behind(recorded, monkeypatch, lost):
    model, method, _ = recorded
    backend = type(active_backend())
    plain = backend.compact

    def partial(self, caches, kept, length, sort):
        stays = caches[{"keys": 0, "values": 1}[lost]]
        row = stays[0, 0].clone()
        moved = plain(self, caches, kept, length, sort)
        stays[0, 0] = row
        return moved

    monkeypatch.setattr(backend, "compact", partial)
    assert equality_fails(model, method)


def test_harness_finds_an_eviction_that_is_one_row_short(recorded, monkeypatch):
    """The engine goes on seeing one evicted row, and accounts for it."""
    model, method, _ = recorded
    plain = EmbeddedSession.compress

    def generous(self, eviction):
        plain(self, eviction)
        self.cache.length += 1
        self.ledger.live += 1

    monkeypatch.setattr(EmbeddedSession, "compress", generous)
    trace = drive(model, method, {"only": short_turns()})["only"]
    assert failures(model, method, trace) & {"masked-cache equality", "kept sets"}


def test_a_cache_that_is_not_what_the_account_says_ends_the_session(recorded, monkeypatch):
    model, method, _ = recorded
    plain = SessionCache.keep

    def generous(self, kept, *args, **options):
        moved = plain(self, kept, *args, **options)
        self.length += 1
        return moved

    monkeypatch.setattr(SessionCache, "keep", generous)
    with pytest.raises(KVBenchError, match=r"cache holds .* rows, the account says"):
        drive(model, method, {"only": short_turns()})


@pytest.mark.parametrize("offset", [-1, 1])
def test_harness_finds_rotary_positions_that_are_off_after_an_eviction(
    recorded, monkeypatch, offset
):
    """Right rows, right masks, but tokens after the first event rotated one position off."""
    model, method, _ = recorded
    plain = scheduler.pack

    def shifted(sessions, *others):
        packed = plain(sessions, *others)
        moved = any(session.stats().events for session in sessions)
        places = [place + offset * moved for place in packed.positions]
        return replace(packed, positions=places)

    monkeypatch.setattr(scheduler, "pack", shifted)
    assert equality_fails(model, method)
