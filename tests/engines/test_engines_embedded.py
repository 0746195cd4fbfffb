"""The embedded engine against Hugging Face, and what it promises about sessions."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentbench_kv.engines.base import FinishReason, Sampling
from agentbench_kv.engines.embedded import scheduler as scheduling
from agentbench_kv.errors import (
    CapacityError,
    ContextLimitError,
    KVBenchError,
    SessionFailedError,
    UsageError,
)
from agentbench_kv.methods.base import Phase


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1, 97) for i in range(length)]


def hf_greedy(model: Any, ids: list[int], tokens: int) -> list[int]:
    given = torch.tensor([ids])
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_full_equals_hugging_face_over_turns(
    family: str, tiny_model: Any, make_engine: Any, start_session: Any
) -> None:
    network = tiny_model(family)
    reference = copy.deepcopy(network)
    reference.set_attn_implementation("sdpa")
    engine = make_engine(network)
    ids = prompt(1, 700)
    start_session(engine, "a", ids)
    for turn in range(3):
        out = list(engine.generate("a", Sampling(max_tokens=12)))
        assert out == hf_greedy(reference, ids, 12)
        more = prompt(10 + turn, 9)
        engine.extend("a", more, [Phase.OTHERS] * len(more))
        ids += out + more


@pytest.mark.parametrize("method", ["full", "agentkv", "snapkv", "streamingllm"])
def test_tokens_do_not_depend_on_company(
    method: str, tiny_model: Any, make_engine: Any, start_session: Any
) -> None:
    network = tiny_model("qwen3")
    budget = None if method == "full" else 64
    settings = {"interval": "16"} if budget else {}
    prompts = {f"s{i}": prompt(i, 20 + 67 * i) for i in range(6)}

    def play(names: list[str]) -> dict[str, list[int]]:
        engine = make_engine(network, method, budget, settings)
        for name in names:
            start_session(engine, name, prompts[name])
        out: dict[str, list[int]] = {name: [] for name in names}
        for turn in range(3):
            running = {name: engine.generate(name, Sampling(max_tokens=25)) for name in names}
            for name, generation in running.items():
                out[name] += list(generation)
                more = prompt(100 + turn, 7)
                engine.extend(name, more, [Phase(t % 4) for t in more])
        return out

    together = play(list(prompts))
    alone = {name: play([name])[name] for name in prompts}
    assert together == alone


def test_seeded_sampling_is_reproducible_and_not_greedy(
    make_engine: Any, start_session: Any
) -> None:
    engine = make_engine()
    outputs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        start_session(engine, name, prompt(3, 30))
        sampling = Sampling(max_tokens=30, temperature=1.5, seed=seed)
        outputs.append(list(engine.generate(name, sampling)))
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


def test_top_k_one_is_greedy(make_engine: Any, start_session: Any) -> None:
    engine = make_engine()
    start_session(engine, "a", prompt(4, 30))
    start_session(engine, "b", prompt(4, 30))
    greedy = list(engine.generate("a", Sampling(max_tokens=20)))
    drawn = list(engine.generate("b", Sampling(max_tokens=20, temperature=2.0, top_k=1)))
    assert drawn == greedy


def test_stop_token_and_stop_callback_end_after_their_token(
    make_engine: Any, start_session: Any
) -> None:
    engine = make_engine()
    for name in "abc":
        start_session(engine, name, prompt(5, 30))
    free = list(engine.generate("a", Sampling(max_tokens=20)))
    stop = free[7]
    first = free.index(stop)
    by_id = engine.generate("b", Sampling(max_tokens=20, stop_token_ids=frozenset({stop})))
    assert list(by_id) == free[: first + 1]
    assert by_id.finish_reason is FinishReason.STOP
    seen: list[int] = []

    def third(token: int) -> bool:
        seen.append(token)
        return len(seen) == 3

    by_call = engine.generate("c", Sampling(max_tokens=20, stop=third))
    assert list(by_call) == free[:3]
    assert engine.stats("c").decode_tokens == 3


def test_cancel_leaves_an_exact_log(make_engine: Any, start_session: Any) -> None:
    engine = make_engine()
    start_session(engine, "a", prompt(6, 40))
    generation = engine.generate("a", Sampling(max_tokens=4000))
    stream = iter(generation)
    got = [next(stream), next(stream)]
    generation.cancel()
    got += list(stream)
    assert generation.finish_reason is FinishReason.CANCELLED
    assert engine.stats("a").logical == 40 + len(got)
    assert engine.stats("a").decode_tokens == len(got)


def test_events_keep_the_budget_and_are_accounted(make_engine: Any, start_session: Any) -> None:
    engine = make_engine(None, "agentkv", 64, {"interval": "16"})
    start_session(engine, "a", prompt(7, 300))
    list(engine.generate("a", Sampling(max_tokens=100)))
    stats = engine.stats("a")
    assert len(stats.events) == 6
    assert stats.peak_live == 300 + 15
    assert [event.live_after for event in stats.events] == [64] * 6
    assert stats.evicted == sum(e.live_before - e.live_after for e in stats.events)
    assert stats.logical == 400
    assert stats.live == 399 - stats.evicted
    # Rows moved never exceed min(kept, evicted) per head: 2 layers of 2 KV heads.
    for event in stats.events:
        assert event.rows_moved <= 4 * min(64, event.live_before - 64)


def test_compress_at_once_after_a_long_prefill(make_engine: Any, start_session: Any) -> None:
    engine = make_engine(None, "snapkv", 64, {"trigger": "prefill+every"})
    start_session(engine, "a", prompt(8, 1200))
    list(engine.generate("a", Sampling(max_tokens=2)))
    stats = engine.stats("a")
    assert [(e.live_before, e.live_after) for e in stats.events] == [(1200, 64)]
    assert stats.longest_prefill == 1200


def test_memory_comes_back(make_engine: Any, start_session: Any) -> None:
    engine = make_engine(None, "streamingllm", 64, {"trigger": "prefill+every"})
    start_session(engine, "a", prompt(9, 2000))
    list(engine.generate("a", Sampling(max_tokens=1)))
    assert engine.allocated_bytes("a") <= 256 * engine.bytes_per_token
    engine.close("a")
    start_session(engine, "b", prompt(9, 10))
    list(engine.generate("b", Sampling(max_tokens=1)))
    assert engine.pool_bytes <= 256 * engine.bytes_per_token


def test_waiting_for_memory_then_served(make_engine: Any, start_session: Any) -> None:
    engine = make_engine(max_live_tokens=300)
    answers: dict[str, int] = {}

    def play(name: str) -> None:
        start_session(engine, name, prompt(int(name), 100))
        answers[name] = len(list(engine.generate(name, Sampling(max_tokens=20))))
        engine.close(name)

    threads = [threading.Thread(target=play, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {str(i): 20 for i in range(8)}


def test_what_never_fits_is_refused(make_engine: Any, start_session: Any) -> None:
    engine = make_engine(max_live_tokens=100)
    start_session(engine, "a", prompt(1, 150))
    with pytest.raises(CapacityError, match="holds 100 tokens"):
        list(engine.generate("a", Sampling(max_tokens=10)))


def test_what_never_fits_waits_for_nobody(make_engine: Any, start_session: Any) -> None:
    engine = make_engine(max_live_tokens=200)
    start_session(engine, "at rest", prompt(1, 20))
    list(engine.generate("at rest", Sampling(max_tokens=10)))
    start_session(engine, "huge", prompt(2, 250))
    with pytest.raises(CapacityError, match=r"needs 25\d beside 29 of other sessions"):
        list(engine.generate("huge", Sampling(max_tokens=1)))
    start_session(engine, "small", prompt(3, 20))
    assert len(list(engine.generate("small", Sampling(max_tokens=10)))) == 10


@pytest.mark.parametrize("method", ["full", "snapkv", "h2o"])
def test_a_cancelled_prompt_is_not_read_to_its_end(
    method: str, make_engine: Any, start_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "PREFILL_CHUNK", 16)
    genuine, steps = scheduling.EmbeddedScheduler._step, list[int]()

    def step(self: Any, batch: list[Any]) -> None:
        genuine(self, batch)
        steps.append(len(batch))
        if len(steps) == 1:
            batch[0].cancel()

    monkeypatch.setattr(scheduling.EmbeddedScheduler, "_step", step)
    engine = make_engine(None, method, None if method == "full" else 64, {})
    start_session(engine, "a", prompt(1, 100))
    generation = engine.generate("a", Sampling(max_tokens=10))
    assert list(generation) == []
    assert generation.finish_reason is FinishReason.CANCELLED
    assert (len([n for n in steps if n]), engine.stats("a").prefill_tokens) == (1, 16)
    more = prompt(2, 20)
    engine.extend("a", more, [Phase.OTHERS] * len(more))
    said = list(engine.generate("a", Sampling(max_tokens=150)))
    start_session(engine, "whole", prompt(1, 100) + more)
    assert list(engine.generate("whole", Sampling(max_tokens=150))) == said
    found = [engine.stats(name).recorded() for name in ("a", "whole")]
    assert found[0] | {"longest_prefill": 120} == found[1]


def test_context_limit(tiny_model: Any, make_engine: Any, start_session: Any) -> None:
    engine = make_engine(tiny_model("qwen3", max_position_embeddings=64))
    start_session(engine, "a", prompt(1, 50))
    generation = engine.generate("a", Sampling(max_tokens=100))
    assert len(list(generation)) == 14
    assert generation.finish_reason is FinishReason.CONTEXT_LIMIT
    with pytest.raises(ContextLimitError, match="context is 64"):
        engine.extend("a", [1], [Phase.OTHERS])


def test_bfloat16_runs(tiny_model: Any, make_engine: Any, start_session: Any) -> None:
    engine = make_engine(tiny_model("qwen3").bfloat16(), "agentkv", 32, {"interval": "8"})
    start_session(engine, "a", prompt(1, 100))
    assert len(list(engine.generate("a", Sampling(max_tokens=40)))) == 40
    assert engine.info.dtype == "bfloat16"
    assert len(engine.stats("a").events) == 5


def test_errors_of_misuse(make_engine: Any, start_session: Any) -> None:
    engine = make_engine()
    start_session(engine, "a", [1, 2])
    with pytest.raises(KVBenchError, match="open already"):
        start_session(engine, "a", [1])
    with pytest.raises(KeyError):
        engine.stats("nobody")
    engine.shutdown()
    with pytest.raises(KVBenchError, match="shut down"):
        engine.generate("a", Sampling(max_tokens=1))


def test_windows_everywhere_and_unknown_families_are_refused(
    tiny_model: Any, make_engine: Any
) -> None:
    network = tiny_model("mistral")
    network.config.sliding_window = 32
    with pytest.raises(UsageError, match="a window of 32 tokens, so no method has anything"):
        make_engine(network, "streamingllm", 64)
    other = tiny_model("llama")
    other.config.model_type = "gpt2"
    with pytest.raises(UsageError, match="'gpt2' is not supported"):
        make_engine(other)


def test_a_failing_forward_fails_its_sessions_only(
    make_engine: Any, start_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    start_session(engine, "a", prompt(1, 5))
    start_session(engine, "b", prompt(2, 5))
    works: Callable[..., Any] = scheduling.run_network

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(scheduling, "run_network", fails)
    with pytest.raises(SessionFailedError, match="a failed: RuntimeError: no memory left"):
        list(engine.generate("a", Sampling(max_tokens=2)))
    monkeypatch.setattr(scheduling, "run_network", works)
    assert len(list(engine.generate("b", Sampling(max_tokens=2)))) == 2
    with pytest.raises(KVBenchError, match="broke earlier"):
        engine.generate("a", Sampling(max_tokens=2))
