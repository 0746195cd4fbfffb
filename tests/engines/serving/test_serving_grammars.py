"""Answers that a backend holds to a grammar: what it is told of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentbench_kv.engines.base import Capability, EngineInfo, EngineOptions, Sampling
from agentbench_kv.engines.core.grammar import GrammarVocabulary
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.llamacpp import engine as llamacpp
from agentbench_kv.engines.serving import wire as wires
from agentbench_kv.engines.serving.engine import ServingEngine, run_server
from agentbench_kv.engines.serving.model_facts import ModelFacts
from agentbench_kv.engines.serving.wire import GenerationRequest
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
def test_sglang_without_llguidance_starts(grammars: bool, backend: str) -> None:
    options = EngineOptions("micro", make_method("full", None))
    said = sglang.flags(options, FACTS, None, gpu=True, stock=True, grammars=grammars)
    assert said[said.index("--grammar-backend") + 1] == backend


@pytest.mark.parametrize(
    ("version", "tokenizer", "eos", "able"),
    [
        ("1.7.6", "micro", (2,), True),
        ("1.9.1", "micro", (2, 0), True),
        ("", "micro", (2,), False),
        ("0.7.30", "micro", (2,), False),  # SGLang 0.5.12's, which ends its server at a dead end
        ("1.9.1", "", (2,), False),
        ("1.9.1", "odd", (2,), False),
        ("1.9.1", "micro", (), False),
        ("1.9.1", "micro", (99_999,), False),
    ],
)
def test_an_engine_constrains_where_llguidance_can(
    version: str, tokenizer: str, eos: tuple[int, ...], able: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(wires, "version_there", lambda *_: version)
    if tokenizer:
        text = (model_path("micro") / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(text if tokenizer == "micro" else "{}")
    wire = make_wire(VllmEngineWire, tmp_path, "full")
    wire.facts = replace(FACTS, eos_token_ids=eos)
    found = run_server(Unstarted, wire, "stand-in", "sha").info.capabilities
    assert (Capability.CONSTRAIN in found) == able


@pytest.mark.parametrize(("there", "able"), [("0.5.12", False), ("0.5.23", True), ("", True)])
def test_sglang_0_5_12_holds_to_no_grammar_with_any_llguidance(
    there: str, able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(_: Path, name: str) -> str:
        return there if name == "sglang" else "1.9.1"

    for module in (wires, sglang):
        monkeypatch.setattr(module, "version_there", version)
    shutil.copy(model_path("micro") / "tokenizer.json", tmp_path)
    wire = make_wire(sglang.SglangEngineWire, tmp_path, "full")
    wire.facts = replace(FACTS, eos_token_ids=(2,))
    assert [wire.holds_grammars, wire.holds_grammars] == [able, able]
    wire.close()


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
