"""Model folders that are not whole: one line, before anything is computed with what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from agentbench_kv.conformance.engines.fixture import write_model
from agentbench_kv.engines.embedded import model as loading
from agentbench_kv.engines.embedded.model import load_model, model_path
from agentbench_kv.engines.serving.model_facts import read_model
from agentbench_kv.errors import KVBenchError, PrerequisiteError
from agentbench_kv.phases.tokens import load_tokenizer

Change = Callable[[Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    loading._load.cache_clear()
    yield write_model(tmp_path / "model", "qwen3")
    loading._load.cache_clear()


def cut(name: str) -> Change:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def setting(file: str, name: str, value: Any) -> Change:
    def change(folder: Path) -> None:
        document = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(document | {name: value}))

    return change


def less(folder: Path) -> None:
    """Drop a tensor, which transformers would draw at random and go on."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


CONFIG, ENDS = "config.json", "generation_config.json"
DAMAGE: dict[str, tuple[Change, str]] = {
    "an empty folder": (empty, "No such file or directory.*give a Hugging Face model folder"),
    "cut weights": (cut("model.safetensors"), "cannot load the model in"),
    "no weights": (gone("model.safetensors"), "cannot load the model in"),
    "weights of garbage": (text("model.safetensors", "x" * 100), "cannot load the model in"),
    "a tensor less": (less, r"lack 1 tensors, such as model\.layers\.1\.mlp\.up_proj\.weight"),
    "a list": (text(CONFIG, "[]"), "it holds no JSON object"),
    "deep": (text(CONFIG, "[" * 100_000), "cannot read"),
    "a billion layers": (setting(CONFIG, "num_hidden_layers", 10**9), "expected 1 to 10000"),
    "layers of text": (setting(CONFIG, "num_hidden_layers", "x"), "num_hidden_layers is x"),
    "another width": (setting(CONFIG, "hidden_size", 64), "cannot load the model in"),
    "a width of text": (setting(CONFIG, "hidden_size", "wide"), "cannot load the model in"),
    "no heads": (setting(CONFIG, "num_attention_heads", 0), "cannot load the model in"),
    "ends that are not JSON": (text(ENDS, "{"), "cannot read .*generation_config"),
    "an end of text": (setting(ENDS, "eos_token_id", "</s>"), "eos_token_id is </s>, expected"),
    "ends of text": (setting(ENDS, "eos_token_id", [1, "x"]), "expected a token's number"),
    "code of its own": (setting(CONFIG, "auto_map", {"AutoConfig": "evil.X"}), ""),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_model_is_one_line(
    damage: Change, said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    capfd.readouterr()
    if not said:  # code that came with a model is passed over
        assert load_model(str(folder), "float32", "cpu").shape.layers == 2
        return
    with pytest.raises(KVBenchError, match=said) as caught:
        load_model(str(folder), "float32", "cpu")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # the library says nothing of its own


@pytest.mark.parametrize(
    "damage",
    [
        cut("tokenizer.json"),
        text("tokenizer.json", "{}"),
        text("tokenizer.json", "[" * 100_000),
        gone("tokenizer.json"),
        setting("tokenizer.json", "model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        setting("tokenizer_config.json", "model_max_length", []),
        setting("tokenizer_config.json", "eos_token", {"x": 1}),
    ],
    ids=range(7),
)
def test_a_damaged_tokenizer_is_one_line(damage: Change, folder: Path) -> None:
    damage(folder)
    with pytest.raises(PrerequisiteError, match="no usable tokenizer in") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_serving_engines_read_the_same_settings(folder: Path) -> None:
    assert (
        read_model(folder).eos_token_ids == load_model(str(folder), "float32", "cpu").eos_token_ids
    )
    setting(ENDS, "eos_token_id", None)(folder)
    setting(CONFIG, "eos_token_id", [3, 4])(folder)
    assert read_model(folder).eos_token_ids == (3, 4)
    setting(CONFIG, "num_attention_heads", 0)(folder)
    setting(CONFIG, "head_dim", None)(folder)
    with pytest.raises(PrerequisiteError, match="is not a decoder's"):
        read_model(folder)
    text("tokenizer_config.json", "7")(folder)
    with pytest.raises(PrerequisiteError, match="it holds no JSON object"):
        model_path(str(folder))
