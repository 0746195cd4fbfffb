"""A context that was asked for: smaller than the model's, or larger by YaRN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentbench_kv.conformance.families import write_family
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.context import Yarn, stretch, stretched_folder
from agentbench_kv.engines.embedded.model import load_model, model_path
from agentbench_kv.engines.llamacpp.models import rope_divisors
from agentbench_kv.engines.serving.refusals import read_asked
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import make_method


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_qwen_is_stretched_as_its_publisher_says() -> None:
    assert stretch("qwen3", 40_960, "default", 131_072) == Yarn(4.0, 32_768)
    assert stretch("qwen2", 32_768, "default", 65_536) == Yarn(2.0, 32_768)
    assert stretch("qwen3", 40_960, "default", 40_960) is None
    assert stretch("llama", 2048, "llama3", 100) is None
    assert stretch("llama", 2048, "default", 0) is None


@pytest.mark.parametrize(
    ("family", "trained", "rope", "asked", "said"),
    [
        ("qwen3", 40_960, "default", 131_073, "up to 4 times 32768; give 131072 or less"),
        ("llama", 8192, "default", 8193, "llama is not known to go further; give 8192 or less"),
        ("qwen2", 32_768, "yarn", 65_536, "RoPE 'yarn' is not known to go further"),
        ("qwen2", 32_768, "default", 3, "expected at least 16 tokens"),
    ],
)
def test_what_nobody_has_described_is_refused(
    family: str, trained: int, rope: str, asked: int, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        stretch(family, trained, rope, asked)


def test_every_engine_reads_the_longer_context_from_one_folder(home: Path) -> None:
    folder = stretched_folder(model_path("micro"), 65_536)
    assert folder.is_relative_to(home)
    assert stretched_folder(model_path("micro"), 65_536) == folder
    config = AutoConfig.from_pretrained(folder)
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    model = load_model("micro", "float32", "cpu", 65_536)
    assert torch.equal(model.frequencies, frequencies)
    assert (model.context_limit, model.rope_scale) == (65_536, scale)
    assert model.rope_scale > 1
    plain = load_model("micro", "float32", "cpu")
    assert not torch.equal(plain.frequencies, frequencies)
    divisors = torch.tensor(rope_divisors(config.rope_parameters, config.head_dim))
    assert torch.allclose(plain.frequencies / divisors, frequencies, rtol=1e-5)
    options = EngineOptions("micro", make_method("full", None), context_limit=65_536)
    path, facts = read_asked(options)
    assert (path, facts.context_limit, facts.rope_type) == (folder, 65_536, "yarn")


def test_a_smaller_context_changes_nothing_else() -> None:
    assert stretched_folder(model_path("micro"), 500) == model_path("micro")
    small, plain = (load_model("micro", "float32", "cpu", limit) for limit in (500, 0))
    assert (small.context_limit, plain.context_limit) == (500, 32_768)
    assert torch.equal(small.frequencies, plain.frequencies)


def test_other_families_keep_their_context(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "llama", "llama")
    with pytest.raises(UsageError, match="llama is not known to go further"):
        load_model(str(folder), "float32", "cpu", 4096)
