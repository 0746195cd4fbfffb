"""`selftest models`: the families' table, that the oracle sees mistakes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from agentbench_kv import kernels
from agentbench_kv.cli import kvbench
from agentbench_kv.conformance import models
from agentbench_kv.conformance.driver import TurnPlan, drive, short_turns
from agentbench_kv.conformance.engines.fixture import VOCAB, prompt
from agentbench_kv.conformance.families import FAMILIES, build_family, write_family
from agentbench_kv.conformance.kept_sets import check_replay
from agentbench_kv.conformance.masked import check_trace
from agentbench_kv.conformance.models import (
    EXACT,
    FAILED,
    REFUSED,
    SKIPPED,
    FamilyRow,
    ModelVerdict,
    as_markdown,
    model_suite,
)
from agentbench_kv.conformance.reference import reference_error
from agentbench_kv.engines.embedded import attention
from agentbench_kv.engines.embedded.architecture import Attention
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.windows import WindowCache
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.registry import make_method

REFUSALS = {
    "gemma2": "caps attention logits",
    "deepseek-v3": "latent attention",
    "qwen3-next": "linear_attention layers keep a state",
    "llama4": "in chunks",
    "stablelm": "nobody has checked it",
}
WHOLLY_WINDOWED = ("mistral-window", "phi3-window")
# Each has something that no other family here has.
PECULIAR = ("glm4", "phi4-mini", "gemma3", "gpt-oss", "qwen3-moe")


def problems(family: str, name: str, tolerance: float = 1e-3) -> list[str]:
    network, method = build_family(family), make_method(name, 96, {"interval": 32})
    trace = drive(network, method, {"a": short_turns(VOCAB)})["a"]
    results = check_trace("a", network, method, trace, 3, tolerance)
    results.append(check_replay("a", network, method, trace))
    return [f"{each.name}: {each.detail}" for each in results if not each.ok]


@pytest.mark.parametrize("method", ["agentkv", "streamingllm@paper"])
@pytest.mark.parametrize("family", PECULIAR)
def test_logits_and_kept_sets_are_those_of_eager_attention(family: str, method: str) -> None:
    assert problems(family, method) == []


@pytest.mark.parametrize("family", [*PECULIAR, "stablelm"])
def test_the_oracle_is_eager_attention_where_nothing_was_evicted(family: str) -> None:
    """Of stablelm, too, whose code hands on no arguments that it does not know."""
    assert reference_error(build_family(family), prompt(100, 0)) < 1e-5


@pytest.mark.parametrize("method", ["h2o", "snapkv@original"])
def test_sums_and_own_caches_beside_sinks(method: str) -> None:
    assert problems("gpt-oss", method) == []


def no_sinks(*args: Any) -> Tensor:
    *rows, _, before = args
    return kernels.attention(*rows, None, before)


def not_turned(cache: WindowCache, by: int, frequencies: Tensor) -> None:
    del cache, by, frequencies


MISTAKES: dict[str, tuple[str, str, Any, str, Any]] = {
    "sinks forgotten": ("gpt-oss", "agentkv", attention, "attention", no_sinks),
    "a window too wide": (
        *("gemma3", "agentkv", WindowCache, "rows_with_next"),
        property(lambda cache: min(cache.fed + 1, cache._window + 1)),
    ),
    "a window left behind": (*("gpt-oss", "streamingllm@paper", WindowCache, "turn"), not_turned),
    "own query scale forgotten": (
        *("gemma3", "agentkv", attention, "as_methods_see"),
        lambda queries, _scaling: queries * 0.25,
    ),
}


@pytest.mark.parametrize(
    ("family", "method", "owner", "name", "wrong"), MISTAKES.values(), ids=MISTAKES
)
def test_the_oracle_sees_a_mistake(
    family: str, method: str, owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    assert problems(family, method)


def test_the_oracle_sees_other_pairs_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentbench_kv.engines.embedded.architecture.INTERLEAVED", ())
    assert problems("glm4", "streamingllm@paper")


@pytest.mark.parametrize("family", [*REFUSALS, *WHOLLY_WINDOWED])
def test_what_cannot_be_right_is_refused_by_its_settings(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / family, family)
    (folder / "model.safetensors").unlink()
    method = make_method("agentkv", 96)
    if family in WHOLLY_WINDOWED:
        EmbeddedEngine.check_model(str(folder))
    with pytest.raises(UsageError, match=REFUSALS.get(family, "window of 48 tokens")) as caught:
        EmbeddedEngine.check_method(str(folder), method)
    assert "\n" not in str(caught.value)


def test_a_dry_run_refuses_what_a_run_would(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "deepseek-v3")
    asked = ["run", "--model", str(folder), "--task", "micro/recall-1k", "--method", "full"]
    done = CliRunner().invoke(kvbench, [*asked, "--dry-run", "--out", str(tmp_path / "runs")])
    assert isinstance(done.exception, UsageError)
    assert "latent attention (MLA)" in str(done.exception)


def test_a_multimodal_folder_gives_its_text_part(tmp_path: Path) -> None:
    assert not isinstance(build_family("gemma3-nested"), type(build_family("gemma3")))
    row = model_suite(["embedded"], ["gemma3-nested"], methods=("streamingllm@paper",))[0]
    assert row.outcome == EXACT
    assert row.reach == "2 of 4"
    folder = write_family(tmp_path / "other", "gemma3-nested")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attn_logit_softcapping"] = 30.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="caps attention logits"):
        EmbeddedEngine.check_model(str(folder))


def test_calibrations_read_no_other_pairs() -> None:
    method = make_method("triattention", 96)
    for about in (Attention((), interleaved=True), Attention((), partial=True)):
        with pytest.raises(UsageError, match="RoPE turns others"):
            about.check_calibration(method.label)


class Unable(EmbeddedEngine):
    """An engine whose environment is not there."""

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:  # noqa: ARG003
        raise PrerequisiteError("no environment; kvbench env create it")


class Crooked(EmbeddedEngine):
    """An engine that says something else of a refused model than one line."""

    @classmethod
    def check_model(cls, model: str) -> None:
        if model != "micro":
            raise UsageError("first\nsecond")


@pytest.mark.parametrize(("cls", "outcome"), [(Unable, SKIPPED), (Crooked, FAILED)])
def test_engines_that_are_not_there_or_say_too_much(
    cls: type[EmbeddedEngine], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load_engine", lambda _: cls)
    row = model_suite(["it"], ["llama"], methods=("full",))[0]
    assert row.outcome.startswith(outcome)
    assert row.failed == (outcome == FAILED)


def test_the_table_has_a_row_a_family_and_a_column_an_engine() -> None:
    no, yes, why = ModelVerdict(REFUSED, "why not"), ModelVerdict(EXACT, "9 tokens"), "other words"
    rows = [
        FamilyRow("llama", "", "a", "", {"full": no, "agentkv": no}),
        FamilyRow("qwen2", "", "a", "all", {"full": yes, "agentkv": yes}),
        FamilyRow("qwen2", "", "b", "all", {"full": yes, "agentkv": no}),
        FamilyRow("llama", "", "b", "1 of 2", {"agentkv": ModelVerdict(FAILED, why)}),
    ]
    assert as_markdown(rows) == [
        "| family | attention | layers in reach | a | b |",
        "| --- | --- | --- | --- | --- |",
        "| llama | plain | 1 of 2 | refused [1] | FAILED [2] |",
        "| qwen2 | bias on queries and keys | all | exact | exact (full); refused (agentkv) [1] |",
        "",
        "1. why not",
        "2. other words",
    ]


def invoke(*words: str) -> Any:
    return CliRunner().invoke(kvbench, ["selftest", "models", *words])


def test_the_command_prints_one_row_a_family() -> None:
    done = invoke("--family", "deepseek-v3", "--family", "gemma2", "--markdown")
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert done.exit_code == 0
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == ["deepseek-v3", "gemma2"]
    assert [row.split(" | ")[-1] for row in rows] == [
        "embedded |",
        "--- |",
        f"{REFUSED} [1] |",
        f"{REFUSED} [2] |",
    ]
    assert "\n\n1. model family 'deepseek_v3' is not supported" in done.stdout
    assert isinstance(invoke("--family", "nobody").exception, UsageError)
    document = json.loads(invoke("--family", "gemma2", "--json").stdout)
    assert document[0]["verdicts"]["full"]["outcome"] == REFUSED


def test_every_family_is_one_transformers_has() -> None:
    from transformers import AutoConfig

    for name, family in FAMILIES.items():
        document = family.document()
        made: Any = AutoConfig.for_model(document.pop("model_type"), **document)
        assert made.to_dict(), name


def test_a_window_that_is_tried_again_is_as_if_it_had_not_failed() -> None:
    """Prefill chunks beyond the window, one of them written twice before it counts."""
    network = build_family("gpt-oss")
    failed: list[int] = []
    original = WindowCache.write

    def twice(cache: WindowCache, layer: int, keys: Tensor, values: Tensor) -> Any:
        if not failed and cache.fed and keys.shape[1] > 1:
            failed.append(layer)
            original(cache, layer, torch.zeros_like(keys), torch.zeros_like(values))
        return original(cache, layer, keys, values)

    turns = [TurnPlan(prompt(90, 1), 5), TurnPlan(prompt(70, 2), 5)]
    method = make_method("full", None)
    expected = drive(network, method, {"a": turns})["a"].tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowCache, "write", twice)
        assert drive(network, method, {"a": turns})["a"].tokens == expected
    assert failed
