"""Converted models: the same ids and the same logits as in Hugging Face."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentbench_kv.engines.core.gguf_header import read_metadata
from agentbench_kv.engines.core.gguf_tokenizer import write_tokenizer
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.llamacpp.models import convert_elsewhere, model_shape, resolve_model
from agentbench_kv.errors import UsageError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MICRO = model_path("micro")
NOT_FURTHER = 1.5
"""Times Hugging Face's own distance from float64; why this: docs/decisions/0024."""
TEXT = (
    "<|im_start|>user\nthe quick fox's 42 dens?  \n\n<|im_end|>\n<|im_start|>assistant\n<think>\n"
    'hm, żółć!</think>\n<tool_call>{"name": "get"}</tool_call><|im_end|>'
)


@pytest.fixture(scope="module")
def ask(
    llamacpp_python: Path, backend_environment: Callable[[], Any]
) -> Callable[[Path, list[int]], dict[str, Any]]:
    script = Path(__file__).with_name("backend_logits.py")

    def run(path: Path, ids: list[int]) -> dict[str, Any]:
        with backend_environment() as environment:
            done = subprocess.run(
                (str(llamacpp_python), str(script), str(path), TEXT, json.dumps(ids)),
                env=environment | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def saved(family: str, tiny_model: Callable[..., Any], folder: Path) -> Path:
    """Save a model of a family with the micro model's tokenizer."""
    if family == "micro":
        return MICRO
    biases = {"attention_bias": True} if family == "llama" else {}
    tiny_model(family, vocab_size=704, eos_token_id=2, **biases).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MICRO / name, folder / name)
    return folder


def reference(folder: Path, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [ids, vocabulary] of Hugging Face in float32 and, of the same weights, in float64."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        single = network(torch.tensor([ids])).logits[0]
        return single, network.double()(torch.tensor([ids])).logits[0]


def largest(numbers: torch.Tensor) -> float:
    return float(numbers.abs().max())


@pytest.mark.parametrize("family", ["micro", "qwen2", "qwen3", "llama", "mistral"])
def test_ids_and_logits_are_those_of_hugging_face(
    family: str,
    tiny_model: Callable[..., Any],
    ask: Callable[[Path, list[int]], dict[str, Any]],
    llamacpp_python: Path,
    tmp_path: Path,
) -> None:
    folder = saved(family, tiny_model, tmp_path / "model")
    convert_elsewhere(llamacpp_python, folder, tmp_path / "model.gguf")
    ids = AutoTokenizer.from_pretrained(folder).encode(TEXT, add_special_tokens=False)
    single, exact = reference(folder, ids)
    found = ask(tmp_path / "model.gguf", ids)
    assert found["ids"] == ids
    assert found["ends"] == [2]
    logits = torch.tensor(found["logits"])
    if family == "micro":
        assert largest(logits - single) <= 1e-5 * largest(exact)
        assert largest(logits - exact) <= NOT_FURTHER * largest(single - exact)
    else:
        assert largest(logits - single) <= 1e-5
        assert largest(logits - exact) <= 1e-5


def test_the_tokenizer_of_a_file_is_the_one_it_was_made_from(
    llamacpp_python: Path, tmp_path: Path
) -> None:
    convert_elsewhere(llamacpp_python, MICRO, tmp_path / "micro.gguf")
    folder = write_tokenizer(read_metadata(tmp_path / "micro.gguf"), tmp_path / "tokenizer")
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (folder, MICRO))
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.chat_template == theirs.chat_template


def test_a_folder_is_converted_once(llamacpp_python: Path) -> None:
    first = resolve_model("micro", llamacpp_python)
    changed = first.file.stat().st_mtime_ns
    assert resolve_model("micro", llamacpp_python).file.stat().st_mtime_ns == changed
    assert first.tokenizer == MICRO
    assert model_shape(read_metadata(first.file)).layers == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
    ],
)
def test_what_the_file_could_not_express_is_refused(
    change: dict[str, Any], said: str, llamacpp_python: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(MICRO, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UsageError, match=said):
        convert_elsewhere(llamacpp_python, folder, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("*.gguf*"))
