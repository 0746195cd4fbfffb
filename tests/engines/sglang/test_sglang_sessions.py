"""The engine in the SGLang it was written for; skipped where its environment is not built."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.conformance.engines import engine_suite
from agentbench_kv.conformance.engines.fixture import prompt, write_model
from agentbench_kv.engines.base import Engine, EngineOptions, KVStats, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.serving.transport import post_events
from agentbench_kv.engines.sglang.engine import SglangEngine
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

pytestmark = pytest.mark.engine

PAGE = 16
TURNS = ((260, 40), (70, 40), (300, 40), (0, 20), (25, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def sglang(sglang_python: Path, folder: Path) -> Iterator[SglangEngine]:  # noqa: ARG001
    """One server for all tests: pages of 16, chunks of 128, the overlapping scheduler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        patch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
        arguments = {"page-size": str(PAGE), "chunked-prefill-size": "128"}
        method = make_method("full-constrained", None)
        made = SglangEngine.create(
            EngineOptions(
                str(folder), method, device="cpu", max_live_tokens=4096, engine_args=arguments
            )
        )
        yield made
        made.shutdown()


@pytest.fixture
def plain(sglang: SglangEngine) -> SglangEngine:
    sglang.reconfigure(make_method("full-constrained", None))
    return sglang


def embedded(folder: Path, method: Method) -> EmbeddedEngine:
    return EmbeddedEngine.create(
        EngineOptions(str(folder), method, device="cpu", max_live_tokens=100_000)
    )


def turn(engine: Engine, name: str, ids: Sequence[int], out: int) -> list[int]:
    engine.extend(name, ids, [TokenPhases().label(token) for token in ids])
    return list(engine.generate(name, Sampling(out)))


def play(engine: Engine, name: str, seed: int) -> tuple[list[list[int]], KVStats]:
    engine.open(name, TokenPhases())
    turns = [
        turn(engine, name, prompt(length, seed + i), out) for i, (length, out) in enumerate(TURNS)
    ]
    return turns, engine.close(name)


@pytest.mark.parametrize(
    ("name", "budget", "settings"),
    [
        ("agentkv", 96, {"interval": 32}),
        ("agentkv", 90, {"interval": 24, "trigger": "turn"}),
        ("snapkv", 90, {"interval": 24, "trigger": "prefill+every"}),
        ("h2o", 96, {"interval": 32}),
        ("streamingllm", 96, {"interval": 32, "positions": "cache"}),
        ("full-constrained", None, {}),
    ],
)
def test_sessions_are_the_embedded_engines(
    sglang: SglangEngine,
    folder: Path,
    name: str,
    budget: int | None,
    settings: dict[str, int | str],
) -> None:
    method = make_method(name, budget, settings)
    sglang.reconfigure(method)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda i: play(sglang, f"s{i}", 10 * i), range(3)))
    reference = embedded(folder, method)
    wanted = [play(reference, f"s{i}", 10 * i) for i in range(3)]
    reference.shutdown()
    for (tokens, stats), (expected, counted) in zip(found, wanted, strict=True):
        assert tokens == expected
        assert stats == counted
    pool = sglang.pool()
    assert (pool["sessions"], pool["free_blocks"]) == (0, pool["total_blocks"])


def test_evicted_spans_are_as_if_masked(plain: SglangEngine, folder: Path) -> None:
    spans = [(10, 45), (100, 131), (400, 420)]
    answers = []
    for engine in (plain, embedded(folder, make_method("full-constrained", None))):
        engine.open("spans", TokenPhases())
        first = turn(engine, "spans", prompt(260, 1), 30)
        removed = engine.evict_spans("spans", spans)
        second = turn(engine, "spans", prompt(60, 2), 40)
        answers.append((first, removed, second, engine.close("spans")))
    assert answers[0] == answers[1]
    assert answers[0][1] == 66
    assert plain.pool()["free_blocks"] == plain.pool()["total_blocks"]


@pytest.mark.slow
def test_more_sessions_at_rest_than_requests_there_may_be(
    sglang_python: Path,  # noqa: ARG001
    folder: Path,
) -> None:
    """They begin while others run, and those that gave way are answered as if nothing was."""
    method = make_method("full-constrained", None)
    most = EngineOptions(
        str(folder), method, device="cpu", max_live_tokens=20_000, concurrency=2,
        engine_args={"max-running-requests": "4"},
    )  # fmt: skip
    engine, alone = SglangEngine.create(most), embedded(folder, method)
    answers, names = [], [f"s{number}" for number in range(8)]
    try:
        for each in (engine, alone):
            for name in ("long", *names):
                each.open(name, TokenPhases())
            each.extend("long", prompt(50, 9), [TokenPhases().label(t) for t in prompt(50, 9)])
            running = each.generate("long", Sampling(600))
            begun = [next(iter(running))]
            found = [turn(each, name, prompt(60, n), 8) for n, name in enumerate(names)]
            found += [turn(each, name, prompt(20, n), 8) for n, name in enumerate(names)]
            answers.append([*found, [*begun, *running]])
            again = [each.close(name).recomputed for name in ("long", *names)]
            assert bool(sum(again)) is (each is engine)
            assert again[0] == 0
    finally:
        engine.shutdown()
        alone.shutdown()
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["scheduler", "detokenizer"])
def test_a_part_that_is_killed_is_started_again(
    sglang_python: Path,  # noqa: ARG001
    part: str,
    survives_a_kill: Callable[[SglangEngine, str], None],
) -> None:
    method = make_method("full-constrained", None)
    engine = SglangEngine.create(EngineOptions("micro", method, device="cpu", concurrency=2))
    survives_a_kill(engine, part)


@pytest.mark.parametrize("main_first", [False, True])
def test_a_fork_shares_rows_and_disturbs_nobody(
    plain: SglangEngine, folder: Path, main_first: bool
) -> None:
    first, own, aside = prompt(203, 3), prompt(40, 4), prompt(30, 5)
    alone = embedded(folder, make_method("full-constrained", None))
    alone.open("main", TokenPhases())
    begun = turn(alone, "main", first, 20)
    went_on = turn(alone, "main", own, 60)
    alone.open("aside", TokenPhases())
    wanted = turn(alone, "aside", [*first, *begun, *aside], 60)
    alone.shutdown()

    plain.open("main", TokenPhases())
    assert turn(plain, "main", first, 20) == begun
    free = plain.pool()["free_blocks"]
    plain.fork("main", "aside", TokenPhases())
    assert free - plain.pool()["free_blocks"] <= 1
    with pytest.raises(KVBenchError, match="shares rows"):
        plain.evict_spans("main", [(0, 10)])
    with ThreadPoolExecutor(2) as threads:
        main = threads.submit(turn, plain, "main", own, 60)
        fork = threads.submit(turn, plain, "aside", aside, 60)
        assert (main.result(), fork.result()) == (went_on, wanted)
    for name in ("main", "aside") if main_first else ("aside", "main"):
        plain.close(name)
    assert plain.pool()["free_blocks"] == plain.pool()["total_blocks"]


def test_a_fork_outlives_its_source(plain: SglangEngine, folder: Path) -> None:
    first, aside = prompt(203, 6), prompt(30, 7)
    alone = embedded(folder, make_method("full-constrained", None))
    alone.open("main", TokenPhases())
    begun = turn(alone, "main", first, 20)
    wanted = turn(alone, "main", aside, 60)
    alone.shutdown()
    plain.open("main", TokenPhases())
    assert turn(plain, "main", first, 20) == begun
    plain.fork("main", "aside", TokenPhases())
    plain.close("main")
    plain.open("noise", TokenPhases())
    turn(plain, "noise", prompt(1500, 8), 10)
    assert turn(plain, "aside", aside, 60) == wanted
    assert plain.evict_spans("aside", [(0, 32)]) == 32
    for name in ("aside", "noise"):
        plain.close(name)
    assert plain.pool()["free_blocks"] == plain.pool()["total_blocks"]


def test_an_answer_of_the_native_endpoint_ends_with_its_accounting(
    sglang: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang.reconfigure(make_method("agentkv", 96, {"interval": 32}))
    said: dict[str, list[Any]] = {}

    def listening(*request: Any) -> Iterator[dict[str, Any]]:
        for event in post_events(*request):
            meta = event["meta_info"]
            said.setdefault(meta["id"].rpartition(".")[0], []).append(meta["kvbench"])
            yield event

    def two_turns(engine: Engine, name: str, length: int) -> tuple[str, list[dict[str, Any]]]:
        engine.open(name, TokenPhases())
        after = []
        for number in range(2):
            turn(engine, name, prompt(length, number), 45)
            after.append(engine.stats(name).as_dict())
        known = sglang.kept_names(name)
        engine.close(name)
        return known, after

    monkeypatch.setattr("agentbench_kv.engines.sglang.engine.post_events", listening)
    with ThreadPoolExecutor(3) as threads:
        played = list(threads.map(lambda n: two_turns(sglang, f"s{n}", n), (60, 140, 201)))
    for name, after in played:
        # The session's last sampled token counts there and is not in the cache here.
        expected = [{**figures, "logical": figures["logical"] - 1} for figures in after]
        assert [each for each in said[name] if each is not None] == expected


def post(engine: SglangEngine, ids: Sequence[int], out: int, **more: Any) -> dict[str, Any]:
    """Send a generation as a client that knows only SGLang would; return its last event's meta."""
    sampling = {"max_new_tokens": out, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(ids), "sampling_params": sampling, "stream": True, **more}
    *_, last = post_events(engine._wire._client, "/generate", body)
    meta: dict[str, Any] = last["meta_info"]
    return meta


def test_a_request_without_a_session_is_accounted_for(sglang: SglangEngine, folder: Path) -> None:
    method = make_method("agentkv", 96, {"interval": 32})
    alone = embedded(folder, method)
    alone.open("one", TokenPhases())
    turn(alone, "one", prompt(140, 0), 45)
    wanted = alone.close("one").as_dict()
    alone.shutdown()
    sglang.reconfigure(method)
    account = post(sglang, prompt(140, 0), 45)["kvbench"]
    assert account["events"] > 0
    for name in ("live", "peak_live", "evicted", "prefill_tokens", "decode_tokens", "events"):
        assert account[name] == wanted[name]
    assert sglang.pool()["sessions"] == 0


def test_a_second_request_of_a_session_is_refused_alone(plain: SglangEngine, folder: Path) -> None:
    alone = embedded(folder, make_method("full-constrained", None))
    alone.open("one", TokenPhases())
    wanted = turn(alone, "one", prompt(90, 0), 400)
    alone.shutdown()
    plain.open("one", TokenPhases())
    plain.extend("one", prompt(90, 0), [TokenPhases().label(token) for token in prompt(90, 0)])
    generation = iter(plain.generate("one", Sampling(400)))
    found = [next(generation)]
    other = post(plain, [1, 2], 5, session_params={"id": plain.kept_names("one")})
    assert "already has an active request" in other["finish_reason"]["message"]
    assert other["kvbench"] is None
    assert [*found, *generation] == wanted
    plain.close("one")
    assert plain.pool()["free_blocks"] == plain.pool()["total_blocks"]


def test_what_cannot_be_is_refused(sglang: SglangEngine) -> None:
    with pytest.raises(UsageError, match="per query head"):
        sglang.reconfigure(make_method("snapkv@original", 96))
    sglang.reconfigure(make_method("agentkv", 96))
    sglang.open("main", TokenPhases())
    turn(sglang, "main", prompt(40, 9), 10)
    with pytest.raises(KVBenchError, match="evicts by itself"):
        sglang.fork("main", "aside", TokenPhases())
    with pytest.raises(KVBenchError, match="other tokens in every head"):
        sglang.evict_spans("main", [(0, 10)])
    with pytest.raises(KVBenchError, match="sessions are open"):
        sglang.reconfigure(make_method("agentkv", 100))
    sglang.close("main")


@pytest.mark.usefixtures("sglang_python")
def test_an_option_that_eviction_cannot_stand_ends_the_start(folder: Path) -> None:
    method = make_method("full-constrained", None)
    options = EngineOptions(
        str(folder), method, device="cpu", engine_args={"enable-mixed-chunk": ""}
    )
    with pytest.raises(PrerequisiteError, match="does not support mixed prefill and decode"):
        SglangEngine.create(options)


def test_every_hook_is_where_it_is_expected(in_sglang: Callable[[str], str]) -> None:
    code = """
from importlib.metadata import version
from agentbench_kv.engines.sglang.plugin.versions import find_version
found, problems = find_version()
print([type(found).__name__, version("sglang").replace(".", ""), problems])
"""
    name, number, problems = ast.literal_eval(in_sglang(code).splitlines()[-1])
    assert problems == []
    assert name == f"Sglang0{number[1:]}"


def test_a_hook_that_moved_is_named(in_sglang: Callable[[str], str]) -> None:
    code = """
from agentbench_kv.engines.sglang.plugin import versions
batch = "sglang.srt.managers.schedule_batch.ScheduleBatch."
moved = versions.Sglang0512()
moved.targets = {batch + "prepare_for_decode": ("self", "moon_phase"), batch + "sleep": ("self",),
    "sglang.srt.nowhere.x": ()}
versions.VERSIONS = (moved,)
print(versions.find_version()[1])
"""
    printed = in_sglang(code).splitlines()[-1]
    for word in ("expected self, moon_phase", "ScheduleBatch.sleep is gone", "nowhere.x is gone"):
        assert word in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [{}, {"page-size": "16", "disable-overlap-schedule": ""}], ids=["plain", "pages"]
)
def test_the_conformance_suite_passes(
    sglang_python: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, str],
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    results = engine_suite("sglang", quick=True, engine_args=arguments)
    failed = [(part, r.name, r.detail) for part, all_ in results.items() for r in all_ if not r.ok]
    assert not failed
