"""Answers that a backend holds to a grammar: what it is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentbench_kv.engines.base import Capability, EngineInfo, EngineOptions, Sampling
from agentbench_kv.engines.core.grammar import GrammarVocabulary
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.llamacpp import engine as llamacpp
from agentbench_kv.engines.serving.engine import ServingEngine, run_server
from agentbench_kv.engines.serving.wire import GenerationRequest, ModelFacts
from agentbench_kv.engines.sglang import engine as sglang
from agentbench_kv.engines.vllm.engine import VllmEngineWire
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.registry import make_method

FACTS = ModelFacts("qwen3", 2, 4, 2, 32, 4096, (1,))
GRAMMAR = 'start: "yes" | "no"'


class Anything:
    """A constraint that allows everything."""

    grammar = GRAMMAR

    def allowed(self) -> NDArray[np.bool_]:
        return np.ones(10, np.bool_)

    def accept(self, token: int) -> None:
        pass


class Lacking(VllmEngineWire):
    """A wire whose environment lacks what grammars need."""

    @property
    def holds_grammars(self) -> bool:
        return False


class Unstarted(ServingEngine):
    """An engine that says what it can, and starts no server."""

    def __init__(self, info: EngineInfo, *_: Any) -> None:
        self.info = info


def make_wire(kind: Any, folder: Path, method: str) -> Any:
    options = EngineOptions("micro", make_method(method, None))
    return kind(options, FACTS, Path("python"), folder, folder, False, method == "full")


def request_of(constraint: Any) -> GenerationRequest:
    sampling = Sampling(8, constraint=constraint)
    return GenerationRequest("s", PromptPhases(), [5, 6], 0, sampling, 8, lambda _: None)


@pytest.mark.parametrize("method", ["full", "full-constrained"])
def test_a_grammar_goes_to_the_backend_in_its_own_words(method: str, tmp_path: Path) -> None:
    held, free = request_of(Anything()), request_of(None)
    vllm = make_wire(VllmEngineWire, tmp_path, method)
    assert vllm._body(held)["structured_outputs"] == {"grammar": GRAMMAR}
    assert "structured_outputs" not in vllm._body(free)
    flags = vllm._flags()
    config = flags[flags.index("--structured-outputs-config") + 1]
    assert json.loads(config) == {"backend": "guidance"}  # which alone reads this Lark
    assert sglang._sampling(held)["ebnf"] == GRAMMAR
    assert "ebnf" not in sglang._sampling(free)
    assert llamacpp._document(held)["grammar"] == GRAMMAR
    assert llamacpp._document(free)["grammar"] is None


@pytest.mark.parametrize(("grammars", "backend"), [(True, "llguidance"), (False, "none")])
def test_sglang_without_llguidance_starts_and_says_that_it_cannot(
    grammars: bool, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    options = EngineOptions("micro", make_method("full", None))
    said = sglang.flags(options, FACTS, None, gpu=True, stock=True, grammars=grammars)
    assert said[said.index("--grammar-backend") + 1] == backend
    wire = make_wire(VllmEngineWire if grammars else Lacking, tmp_path, "full")
    able = run_server(Unstarted, wire, "stand-in", "sha").info.capabilities
    assert (Capability.CONSTRAIN in able) == grammars


def test_a_server_holds_to_a_grammar_as_the_gateway_does() -> None:
    """llama.cpp's reads it anew, from the tokenizer's file."""
    document = (model_path("micro") / "tokenizer.json").read_text()
    ids = {each["content"]: each["id"] for each in json.loads(document)["added_tokens"]}
    end = ids["<|im_end|>"]
    held = GrammarVocabulary(document, [end]).constraint(GRAMMAR)
    first = held.allowed()
    assert 0 < first.sum() < 10
    assert not first[end]
    wrong = GrammarVocabulary(document, [end]).constraint("start: nothing")
    assert wrong.allowed().nonzero()[0].tolist() == [end]
    assert "nothing" in wrong.problem
