"""Given answers under many methods at once, against decodes of the same tokens by the engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.embedded.forced import ForcedPlay, ForcedSession
from agentbench_kv.engines.embedded.model import wrap_model
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.errors import ContextLimitError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import TurnNotes
from agentbench_kv.registry import make_method

TURNS = ((90, 70), (20, 45), (0, 1), (33, 60))  # prompt tokens, answered tokens
SYSTEM = 30  # of the first prompt
PROTECTION = ("protected", "refused", "refused_recent", "refused_budget")
EVERY, SLACK = {"interval": "16"}, {"interval": "16", "trigger": "slack"}
ARMS: list[tuple[str, int | None, dict[str, str]]] = [
    ("agentkv", 48, EVERY),
    ("agentkv", 48, {**EVERY, "trigger": "prefill+every"}),
    ("agentkv", 100, {**EVERY, "sampler": "multiscale"}),
    ("agentkv", 60, {**EVERY, "trigger": "turn"}),
    ("snapkv", 48, SLACK),
    ("snapkv@original", 48, EVERY),
    ("rkv", 64, EVERY),
    ("h2o", 64, EVERY),
    ("streamingllm", 40, {"interval": "10"}),
    ("streamingllm@paper", 40, EVERY),
    ("keydiff", 48, EVERY),
    ("tova", 48, EVERY),
    ("random", 48, EVERY),
    ("agentkv@system", 60, EVERY),
    ("random@prompt", 110, EVERY),
    ("h2o", 64, {**EVERY, "protect": "11"}),
    ("agentkv@prompt", 98, EVERY),  # no room for an event
    ("agentkv", 1000, EVERY),  # never an event
    ("full", None, {}),
]


class Seen(Observer):
    """Logits by the position they predict, and what every event kept."""

    def __init__(self) -> None:
        self.logits: dict[int, torch.Tensor] = {}
        self.kept: list[list[list[int]]] = []

    def on_logits(self, session: str, logical: int, logits: torch.Tensor) -> None:
        del session
        self.logits[logical] = logits.clone()

    def on_event(self, session: str, logical: int, kept_positions: torch.Tensor) -> None:
        del session, logical
        self.kept.append(kept_positions.sort(-1).values.tolist())


def labelled(ids: list[int]) -> list[tuple[int, Phase]]:
    return [(token, Phase(token % 4)) for token in ids]


def decode(engine: Any, start: Any) -> tuple[list[list[int]], list[list[int]], Any]:
    """Let the engine answer greedily; return prompts, answers and the accounting."""
    rng, prompts, answers = random.Random(3), [], []
    for number, (prompt, answer) in enumerate(TURNS):
        prompts.append([rng.randrange(1, 97) for _ in range(prompt)])
        if number == 0:
            start(engine, "s", prompts[0])
            engine.note("s", prompts[0], TurnNotes([], system=SYSTEM))
        else:
            engine.extend("s", prompts[-1], [phase for _, phase in labelled(prompts[-1])])
        answers.append(list(engine.generate("s", Sampling(max_tokens=answer))))
    return prompts, answers, engine.close("s")


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_method_is_played_as_the_engine_decodes(
    family: str,
    arm: tuple[str, int | None, dict[str, str]],
    tiny_model: Any,
    make_engine: Any,
    start_session: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, network = Seen(), tiny_model(family)
    engine = make_engine(network, *arm, recorder=seen)
    prompts, answers, expected = decode(engine, start_session)
    engine.shutdown()
    kept: list[Any] = []
    compress = ForcedSession.compress

    def noted(session: ForcedSession, eviction: Any) -> None:
        compress(session, eviction)
        positions = session.cache.positions[:, :, : session.cache.length]
        kept.append(positions.sort(-1).values.tolist())

    monkeypatch.setattr(ForcedSession, "compress", noted)
    model = wrap_model(network, engine.info.model_path, "in-memory")
    play = ForcedPlay(model, [make_method(*arm)], SYSTEM)
    position = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        position += len(prompt)
        for stretch in play.turn(labelled(prompt), labelled(answer)):
            logits = stretch.full if stretch.of_methods[0] is None else stretch.of_methods[0]
            for row, found in enumerate(logits):
                wanted = seen.logits[position + stretch.first + row]
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
                assert int(found.argmax()) == answer[stretch.first + row]
        position += len(answer)
    assert kept == seen.kept
    (stats,) = play.stats()
    assert stats.events == expected.events
    for name in (
        "decode_tokens",
        "prefill_tokens",
        "bytes_read",
        "peak_live",
        "evicted",
        *PROTECTION,
    ):
        assert getattr(stats, name) == getattr(expected, name), name
    play.close()


@pytest.mark.parametrize("arm", [ARMS[1], ARMS[4], ARMS[7]], ids=str)
def test_token_by_token_it_is_the_decode_to_the_bit(
    arm: tuple[str, int | None, dict[str, str]],
    tiny_model: Any,
    make_engine: Any,
    start_session: Any,
) -> None:
    seen, network = Seen(), tiny_model("qwen3").to(torch.bfloat16)
    engine = make_engine(network, *arm, recorder=seen)
    prompts, answers, expected = decode(engine, start_session)
    engine.shutdown()
    model = wrap_model(network, engine.info.model_path, "in-memory")
    play, position = ForcedPlay(model, [make_method(*arm)], SYSTEM, by_token=True), 0
    for prompt, answer in zip(prompts, answers, strict=True):
        position += len(prompt)
        for stretch in play.turn(labelled(prompt), labelled(answer)):
            (found,) = stretch.full if stretch.of_methods[0] is None else stretch.of_methods[0]
            assert torch.equal(found, seen.logits[position + stretch.first])
        position += len(answer)
    (stats,) = play.stats()
    assert stats.events == expected.events
    assert stats.events
    play.close()


def test_methods_beside_one_another_do_not_matter(tiny_model: Any) -> None:
    model = wrap_model(tiny_model("qwen3"), Path(), "in-memory")
    methods = [make_method(*arm) for arm in ARMS]
    rng = random.Random(5)
    turns = [
        (
            labelled([rng.randrange(1, 97) for _ in range(p)]),
            labelled([rng.randrange(1, 97) for _ in range(a)]),
        )
        for p, a in TURNS
    ]

    def played(chosen: list[Any]) -> list[torch.Tensor]:
        play = ForcedPlay(model, chosen)
        rows: list[list[torch.Tensor]] = [[] for _ in chosen]
        for prompt, answer in turns:
            for stretch in play.turn(prompt, answer):
                for own, logits in zip(rows, stretch.of_methods, strict=True):
                    own.append(stretch.full if logits is None else logits)
        play.close()
        return [torch.cat(own) for own in rows]

    together = played(methods)
    for method, found in zip(methods, together, strict=True):
        (alone,) = played([method])
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    # Without an event there is nothing to differ by.
    assert torch.equal(together[-1], together[-2])
    assert not torch.equal(together[0], together[-1])


def test_the_end_of_the_context_is_said(tiny_model: Any) -> None:
    network = tiny_model("qwen3", max_position_embeddings=64)
    play = ForcedPlay(wrap_model(network, Path(), "in-memory"), [])
    with pytest.raises(ContextLimitError, match="64 tokens"):
        list(play.turn(labelled([1] * 60), labelled([2] * 5)))
