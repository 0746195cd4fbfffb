"""Every token of a session is labelled once, whoever asks first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.session import SessionLabeller
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.machine import PhaseMachine, PhaseTable
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer

CODEC = TokenCodec(load_tokenizer(model_path("micro")))
TABLE = PhaseTable.for_tokenizer(CODEC)
HEADER = [CODEC.added["<|im_start|>"], *CODEC.encode("assistant\n")]
CHUNKS = [HEADER, HEADER, CODEC.encode("a"), *([token] for token in CODEC.added.values())]
IDS = st.lists(st.sampled_from(CHUNKS), max_size=8).map(lambda chunks: [*chain(*chunks)])


def labelled(ids: list[int]) -> list[Phase]:
    return PhaseMachine(TABLE).label_many(ids)


def test_the_ids_have_phases() -> None:
    start = CODEC.added["<|im_start|>"], *CODEC.encode("assistant\n"), CODEC.added["<think>"]
    assert Phase.THINK in labelled(list(start))


@settings(max_examples=300, deadline=None)
@given(
    turns=st.lists(st.tuples(IDS, IDS, st.integers(0, 9), st.booleans()), min_size=1, max_size=5)
)
def test_the_log_has_the_labels_of_one_machine(
    turns: list[tuple[list[int], list[int], int, bool]],
) -> None:
    """However many sampled tokens were read, and whether the engine asked for their labels."""
    labeller, log, phases = SessionLabeller(TABLE), [], []
    for prompt, sampled, unread, asks in turns:
        machine = labeller.copy()
        phases += machine.label_many(prompt)
        labeller.move_to(machine.state)
        log += prompt
        if asks:
            assert [labeller.label(token) for token in sampled] == labelled(log + sampled)[
                len(log) :
            ]
        read = sampled[: max(0, len(sampled) - unread)]
        phases += labeller.keep(read)
        log += read
        assert phases == labelled(log)


def test_no_token_is_labelled_twice(
    monkeypatch: pytest.MonkeyPatch, gateway_of: Callable[..., Gateway]
) -> None:
    calls: list[int] = []
    label = PhaseMachine.label

    def counted(self: PhaseMachine, token: int) -> Phase:
        calls.append(token)
        return label(self, token)

    gateway = gateway_of("<think>\nso</think>one", "two")
    monkeypatch.setattr(PhaseMachine, "label", counted)
    question = {"role": "user", "content": "hi"}
    first = gateway.chat("s", [question])
    gateway.chat("s", [question, first.message, question])
    log, _ = gateway.token_log("s")
    assert calls == log
