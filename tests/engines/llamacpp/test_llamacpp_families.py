"""GGUF files of the tiny random families: on llama.cpp, and read back by the embedded engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentbench_kv.conformance.families import CONTEXT, VOCAB, write_family
from agentbench_kv.engines.core.context import stretched_folder
from agentbench_kv.engines.core.gguf_header import read_metadata, read_rope_factors
from agentbench_kv.engines.embedded.architecture import read_attention
from agentbench_kv.engines.embedded.gguf_weights import gguf_config, load_gguf
from agentbench_kv.engines.embedded.model import load_model, wrap_model
from agentbench_kv.engines.llamacpp.gguf import convert
from agentbench_kv.engines.llamacpp.models import model_shape
from agentbench_kv.errors import UsageError

gguf = pytest.importorskip("gguf", reason="writing files needs gguf: pip install -e '.[llamacpp]'")

EXACT = (
    *("qwen2", "qwen3", "qwen3-moe", "llama", "llama-llama3", "llama-linear", "llama-yarn"),
    "mistral",
)
REFUSED = ("mistral-window", "phi3", "glm4", "gemma3", "gpt-oss", "llama-dynamic")
IDS = torch.randint(4, VOCAB, (1, 300), generator=torch.Generator().manual_seed(3))
TOLERANCE = 2e-4  # of logits up to about 10, float32 on both sides


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Write a family's folder and its GGUF file without a tokenizer, once."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = write_family(tmp_path_factory.mktemp(name), name)
            file = folder.parent / f"{folder.name}.gguf"
            made[name] = folder, convert(folder, file, tokenizer=False)
        return made[name]

    return of


def logits(network: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = network(IDS).logits[0]
    return found


@pytest.mark.parametrize("name", EXACT)
def test_a_file_read_back_is_the_model_it_was_made_of(
    name: str, converted: Callable[[str], tuple[Path, Path]]
) -> None:
    folder, file = converted(name)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_gguf(file, torch.float32)
    state = ours.state_dict()
    assert not any(tensor.is_meta for tensor in state.values())
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(state[key], tensor), key
    # YaRN's and Llama 3's frequencies go through the file as float32.
    assert float((logits(ours) - logits(theirs)).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", EXACT)
def test_keys_turn_as_in_the_model(
    name: str, converted: Callable[[str], tuple[Path, Path]]
) -> None:
    folder, file = converted(name)
    shape = model_shape(read_metadata(file), read_rope_factors(file))
    pairs = torch.arange(shape.head_dim // 2, dtype=torch.float64)
    turns = shape.rope_base ** (-2 * pairs / shape.head_dim)
    turns = turns / torch.tensor(shape.rope_factors or [1.0], dtype=torch.float64)
    model = load_model(str(folder), "float32", "cpu")
    assert torch.allclose(turns.float(), model.frequencies, rtol=1e-5)
    read = wrap_model(load_gguf(file, torch.float32), file, "")
    assert torch.allclose(turns.float(), read.frequencies, rtol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_other_families_are_refused_before_a_file_is_written(name: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", name)
    with pytest.raises(UsageError) as refused:
        convert(folder, tmp_path / "out.gguf")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("*.gguf*"))


def with_pairs(file: Path, out: Path, **pairs: Any) -> Path:
    """Copy a file's header, some values changed or added."""
    reader = gguf.GGUFReader(file)
    name = pairs.pop("architecture", "llama")
    writer = gguf.GGUFWriter(out, name)
    for key, value in read_metadata(file).items():
        key = key.replace("llama.", f"{name}.") if key.startswith("llama.") else key
        if key in ("general.architecture", *pairs):
            continue
        kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        kinds |= {float: writer.add_float32, list: writer.add_array}
        kinds[type(value)](key, value)
    for key, value in pairs.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{name}.{key.replace('__', '.')}", value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"architecture": "gemma3"}, "'gemma3'"),
        ({"rope__scaling__type": "longrope"}, "not understood"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
          "rope__scaling__yarn_beta_fast": 8.0}, "yarn_beta_fast"),
        ({"attention__sliding_window": 64}, "sliding"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_one_line_on_both_engines(
    pairs: dict[str, Any], said: str, converted: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    file = with_pairs(converted("llama")[1], tmp_path / "odd.gguf", **pairs)
    with pytest.raises(UsageError, match=said):
        read_attention(gguf_config(file))
    with pytest.raises(UsageError):
        model_shape(read_metadata(file), read_rope_factors(file))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "limit"), [*((name, 0) for name in EXACT), ("qwen3", 4 * CONTEXT)]
)
def test_logits_on_llama_cpp(
    name: str,
    limit: int,
    converted: Callable[[str], tuple[Path, Path]],
    llamacpp_python: Path,
    backend_environment: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hugging Face's, with YaRN in its configuration where a longer context is asked for."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    folder, file = converted(name)
    script, ids = Path(__file__).with_name("backend_logits.py"), IDS[0].tolist()
    command = (str(llamacpp_python), str(script), str(file), "", json.dumps(ids), str(limit))
    with backend_environment() as environment:
        done = subprocess.run(
            command, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    found = torch.tensor(json.loads(done.stdout)["logits"])
    longer = stretched_folder(folder, limit)
    theirs = logits(AutoModelForCausalLM.from_pretrained(longer, dtype=torch.float32))
    assert float((found - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())
    if limit:
        short = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        assert float((short - theirs).abs().max()) > 0.01
        read = logits(load_gguf(file, torch.float32, limit))
        assert float((read - theirs).abs().max()) <= TOLERANCE
