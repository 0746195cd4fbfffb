"""What differs between the SGLang versions that the plug-in takes, by stand-ins for their records.

Whether the real ones are as described here is checked where SGLang is, when the server starts.
"""

from __future__ import annotations

import sys
from array import array
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentbench_kv.engines.sglang.plugin import hooks, versions
from agentbench_kv.engines.sglang.plugin.hooks import Patches
from agentbench_kv.engines.sglang.plugin.memory import Forks, MemoryPressure
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512, Sglang0523, find_version
from agentbench_kv.engines.sglang.plugin.worker import cut_history

HOST = "agentbench_kv.engines.core.host."


def with_targets(targets: dict[str, tuple[str, ...]]) -> Sglang0512:
    version = Sglang0512()
    version.targets = targets
    return version


def test_the_version_that_is_here_is_taken_or_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = {HOST + "follow_parent": ()}
    here, moved = with_targets(follow), with_targets({HOST + "follow_moon": (), HOST + "x": ()})
    near = with_targets(follow | {HOST + "refuse_untested": ("engine", "moon_phase")})
    monkeypatch.setattr(versions, "VERSIONS", (moved, here))
    assert find_version() == (here, [])
    monkeypatch.setattr(versions, "VERSIONS", (moved, near))
    found, problems = find_version()
    assert found is near
    assert len(problems) == 1
    assert "expected engine, moon_phase" in problems[0]


def test_a_version_has_targets_of_its_own_and_those_of_all() -> None:
    old, new = set(Sglang0512.targets), set(Sglang0523.targets)
    assert any("chunk_cache" in target for target in old - new)
    assert not any("chunk_cache" in target for target in new)
    assert set(versions._COMMON) < old & new


def test_ids_of_evicted_rows_are_left_out_however_a_round_was_cut_before() -> None:
    new = SimpleNamespace(
        origin_input_ids=array("q", range(10)),
        output_ids=array("q", [90, 91, 92]),
        full_untruncated_fill_ids=array("q", [8, 9, 92]),  # cut, then appended to by length
        prefix_len=4,
    )
    Sglang0523().skip_ids(new, 3)
    assert new.full_untruncated_fill_ids.tolist() == [3, 4, 5, 6, 7, 8, 9, 90, 91, 92]
    assert Sglang0523().uncached(new) == 6
    assert new.origin_input_ids.tolist() == list(range(10))
    old = SimpleNamespace(fill_ids=list(range(10)), prefix_indices=[0] * 4)
    old.set_extend_input_len = lambda length: setattr(old, "extend_input_len", length)
    Sglang0512().skip_ids(old, 3)
    assert (old.fill_ids, Sglang0512().uncached(old)) == (list(range(3, 10)), 3)


def test_prefill_graphs_are_switched_off_in_the_words_of_each_version() -> None:
    asked = ["--disable-piecewise-cuda-graph", "--page-size", "16"]
    assert Sglang0512().arguments(asked) == asked
    assert Sglang0523().arguments(asked) == ["--disable-prefill-cuda-graph", "--page-size", "16"]


def last_request() -> Any:
    return SimpleNamespace(
        rid="r",
        session=None,
        origin_input_ids=array("q", range(6)),
        origin_input_ids_unpadded=array("q", range(6)),
        output_ids=array("q", [7, 8]),
        sampling_params=SimpleNamespace(max_new_tokens=2),
    )


@pytest.mark.usefixtures("session_nodes")
def test_a_fork_has_a_history_of_its_own() -> None:
    node = SimpleNamespace(req=last_request())
    main = SimpleNamespace(req_nodes={"r": node}, capacity_of_str_len=9)
    sessions = {"main": main}

    def open_session(asked: Any) -> Any:
        sessions[asked.session_id] = SimpleNamespace(req_nodes={})
        return SimpleNamespace(success=True)

    controller = SimpleNamespace(sessions=sessions, open=open_session)
    scheduler: Any = SimpleNamespace(session_controller=controller)
    nothing: Any = None
    Forks(nothing, nothing, nothing, scheduler, Sglang0523())._open_session("main", "fork")
    # 0.5.23 appends a session's next turn to the arrays of its last request.
    node.req.origin_input_ids.extend([7, 8, 50])
    node.req.origin_input_ids_unpadded.extend([7, 8, 50])
    (copied,) = sessions["fork"].req_nodes.values()
    assert copied.req.origin_input_ids.tolist() == list(range(6))
    assert copied.req.origin_input_ids_unpadded.tolist() == list(range(6))


@pytest.mark.usefixtures("session_nodes")
def test_a_cut_history_is_not_gone_on_with_at_the_lengths_noted_before() -> None:
    node = SimpleNamespace(req=last_request())
    session = SimpleNamespace(req_nodes={"r": node}, committed_origin_len=6)
    cut_history(session, 4)
    Sglang0523().rewrite_history(session)
    (kept,) = session.req_nodes.values()
    assert (kept.req.origin_input_ids.tolist(), len(kept.req.output_ids)) == ([0, 1, 2, 3], 0)
    assert node.req.origin_input_ids.tolist() == list(range(6))
    assert session.committed_origin_len is None


@pytest.mark.parametrize("version", versions.VERSIONS, ids=lambda each: type(each).__name__)
def test_only_an_idle_step_makes_room_for_who_waits(version: Sglang0512) -> None:
    """The batch that runs is the planned one: 0.5.23's scheduler may still hold another."""
    stale = SimpleNamespace(is_empty=lambda: True, reqs=[])
    running = SimpleNamespace(is_empty=lambda: False, reqs=[object()], batch_is_full=True)
    scheduler = SimpleNamespace(
        running_batch=running if type(version) is Sglang0512 else stale,
        chunked_req=None,
        waiting_queue=[SimpleNamespace(rid="w")],
        last_batch=None,
        req_to_token_pool=SimpleNamespace(free_slots=[1]),
    )
    memory = MemoryPressure(None, scheduler, version)  # type: ignore[arg-type]
    patches = Patches(SimpleNamespace(), version)  # type: ignore[arg-type]
    patches._runtime = SimpleNamespace(memory=memory)  # type: ignore[assignment]
    plan = None
    given: tuple[Any, ...] = ()
    if isinstance(version, Sglang0523):
        plan, given = SimpleNamespace(batch_to_run=None, running_batch=running), (running,)
    assert patches.get_new_batch_prefill(lambda *_: plan, scheduler, *given) is plan
    assert (memory._stuck, running.batch_is_full) == (None, True)


@pytest.mark.parametrize("version", versions.VERSIONS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(
    ("free", "own", "admitted"),
    [(0, False, False), (1, False, False), (2, False, True), (0, True, True)],
)
def test_nobody_is_admitted_without_a_row_of_the_table(
    version: Sglang0512, free: int, own: bool, admitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request without a row is admitted already: SGLang 0.5.12 ends where there is no other."""
    results = SimpleNamespace(CONTINUE="continue", NO_TOKEN="no token", OTHER="other")
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("sglang.srt.managers.schedule_policy")
    vars(module)["AddReqResult"] = results
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def request(row: int | None) -> Any:
        rows = SimpleNamespace(req_pool_idx=row)
        more = {"extend_input_len": 5, "full_untruncated_fill_ids": [0] * 5, "prefix_len": 0}
        sampling = SimpleNamespace(max_new_tokens=8, ignore_eos=False)
        more |= {"sampling_params": sampling, "output_ids": []}
        return SimpleNamespace(req_pool_idx=row, kv=rows, **more)

    session = SimpleNamespace(prefix_key=None)
    table: Any = SimpleNamespace(
        of=lambda _: session, resting=list, prefixes=SimpleNamespace(make_room=lambda _: False)
    )
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(free_slots=list(range(free))), waiting_queue=[]
    )
    withdrawn: list[Any] = []
    patches = Patches(SimpleNamespace(), version)  # type: ignore[arg-type]
    patches._runtime = SimpleNamespace(  # type: ignore[assignment]
        table=table,
        memory=MemoryPressure(table, scheduler, version),
        prefixes=SimpleNamespace(may_begin=lambda _: True, withdraw=withdrawn.append),
    )
    asked = request(3 if own else None)
    monkeypatch.setattr(hooks, "add_one_req", lambda *_: adder.can_run_list.append(asked) or "yes")
    adder = SimpleNamespace(can_run_list=[request(1), request(None)])
    found = patches.add_one_req(lambda *_: pytest.fail("wrapped"), adder, asked)
    assert found == ("yes" if admitted else "no token")
    assert withdrawn == ([] if admitted else [session])


class Ended:
    """A stand-in for SGLang's reason of an aborted request."""


class FakeRuntime:
    """Notes what a turn's end does to its session."""

    def __init__(self, session: Any) -> None:
        self.done: list[str] = []
        self.table: Any = SimpleNamespace(
            of=lambda _request: session,
            forget=lambda _session: self.done.append("forget"),
            end_turn=lambda _session, _tokens: self.done.append("end turn"),
        )
        self.steps = SimpleNamespace(
            finish_alone=lambda _request, _session: self.done.append("finish alone"),
            lose=lambda _session: self.done.append("lose"),
        )
        self.forks = SimpleNamespace(hand_over=lambda _session: self.done.append("hand over"))


@pytest.fixture
def abort_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.managers.schedule_batch")
    module.FINISH_ABORT = Ended  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("abort_reason")
@pytest.mark.parametrize(
    ("lasting", "reason", "expected"),
    [
        (False, "stop", ["finish alone", "lose", "forget"]),
        (False, Ended(), ["finish alone", "lose", "forget"]),
        (True, "stop", []),
        (True, Ended(), ["hand over", "lose", "end turn"]),
        (True, None, []),
        (False, None, []),
    ],
)
def test_rows_that_go_are_accounted_for_before_they_do(
    lasting: bool, reason: Any, expected: list[str]
) -> None:
    """In 0.5.23 the end of a turn and its retraction both give the rows back by one function."""
    record = SimpleNamespace(req_pool_idx=3, kv_allocated_len=5)
    request = SimpleNamespace(
        kv=record, finished_reason=reason, finished=lambda: reason is not None
    )
    session = SimpleNamespace(name="s", lasting=lasting, request=request, tokens=4)
    patches = Patches(SimpleNamespace(), Sglang0523())  # type: ignore[arg-type]
    runtime = FakeRuntime(session)
    patches._runtime = runtime  # type: ignore[assignment]
    cache = SimpleNamespace(session=SimpleNamespace(slots={"s": SimpleNamespace(kv=record)}))

    def original(_cache: Any, _request: Any) -> bool:
        runtime.done.append("freed")
        return lasting

    assert patches.claim_kv_row(original, cache, request) is lasting
    assert runtime.done == [*expected, "freed"]


def test_an_answer_of_0523_says_its_accounting_as_one_of_0512_does() -> None:
    """Its front end joins what requests bring along to lists, an entry for every token."""
    patches = Patches(SimpleNamespace(), Sglang0523())  # type: ignore[arg-type]
    meta: dict[str, Any] = {"id": "r"}
    brought = {"kvbench": [None, {"live": 7}], "theirs": [["a"], ["b"]]}

    def original(_manager: Any, said: dict[str, Any], joined: list[Any], *rest: Any) -> None:
        others, index, reason = rest
        assert reason == "stop"
        for name, values in others.items():
            joined.extend(values[index])
            said[name] = joined

    patches.update_request_meta_info(original, None, meta, [], brought, 1, "stop")
    assert meta == {"id": "r", "kvbench": {"live": 7}, "theirs": ["b"]}
    assert brought.keys() == {"kvbench", "theirs"}
