"""What needs no environment: headers, refusals, tokenizers, wheels."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.gguf_header import (
    ROPE_FACTORS,
    read_metadata,
    read_rope_factors,
)
from agentbench_kv.engines.core.gguf_tokenizer import (
    PRETOKENIZERS,
    pretokenizer_name,
    pretokenizer_of,
    tokenizer_files,
)
from agentbench_kv.engines.llamacpp.engine import LlamaCppEngine, _cells
from agentbench_kv.engines.llamacpp.models import model_shape, resolve_model
from agentbench_kv.engines.serving.refusals import refuse_method
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.registry import make_method

PLAIN: dict[str, Any] = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 4,
    "qwen3.embedding_length": 128,
    "qwen3.attention.head_count": 4,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 64,
    "qwen3.attention.value_length": 64,
    "qwen3.context_length": 2048,
    "qwen3.rope.freq_base": 1e5,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}


def packed(pairs: dict[str, Any], magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """A GGUF header of strings, unsigned numbers and lists of either."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def plain(value: Any) -> tuple[int, bytes]:
        return (8, text(value)) if isinstance(value, str) else (4, struct.pack("<I", value))

    data = magic + struct.pack("<IQQ", version, 0, len(pairs))
    for key, value in pairs.items():
        data += text(key)
        if isinstance(value, list):
            kinds = [plain(each) for each in value]
            data += struct.pack("<IIQ", 9, kinds[0][0], len(value))
            data += b"".join(part for _, part in kinds)
        else:
            kind, part = plain(value)
            data += struct.pack("<I", kind) + part
    return data


def test_a_header_is_read(tmp_path: Path) -> None:
    pairs = {"name": "żółw", "count": 7, "words": ["x", "yz"], "numbers": [1, 2, 3]}
    path = tmp_path / "m.gguf"
    path.write_bytes(packed(pairs))
    assert read_metadata(path) == pairs


HEADER = {key: value for key, value in PLAIN.items() if key != "qwen3.rope.freq_base"}


def with_factors(factors: list[float], kind: int = 0, name: str = ROPE_FACTORS) -> bytes:
    """A file whose second tensor is a vector of factors; its header ends anywhere."""
    data = bytearray(packed(HEADER))
    data[8:16] = struct.pack("<Q", 2)
    infos = [("token_embd.weight", (3, 2), 0, 0), (name, (len(factors),), kind, 64)]
    for called, sizes, number, offset in infos:
        data += struct.pack("<Q", len(called)) + called.encode() + struct.pack("<I", len(sizes))
        data += struct.pack(f"<{len(sizes)}QIQ", *sizes, number, offset)
    data += bytes(-len(data) % 32 + 64)
    return bytes(data) + struct.pack(f"<{len(factors)}f", *factors)


def test_factors_of_rope_are_found_behind_the_header(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_factors([1.0, 2.5, 8.0]))
    assert read_rope_factors(path) == (1.0, 2.5, 8.0)
    path.write_bytes(with_factors([1.0], name="other.weight"))
    assert read_rope_factors(path) == ()
    path.write_bytes(packed(HEADER))
    assert read_rope_factors(path) == ()
    path.write_bytes(with_factors([1.0, 2.0], kind=1))
    with pytest.raises(UsageError, match="no vector of float32"):
        read_rope_factors(path)


@given(st.data())
def test_a_file_cut_anywhere_gives_its_factors_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = with_factors([1.0, 2.5, 8.0])
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    cut = bytearray(whole[: data.draw(st.integers(24, len(whole)))])
    cut[data.draw(st.integers(8, len(cut) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(cut)
    with suppress(PrerequisiteError, UsageError):
        assert all(isinstance(each, float) for each in read_rope_factors(path))


@pytest.mark.parametrize(
    ("name", "factors"), [("qwen3", [1.0] * 32), ("llama", [1.0] * 31), ("llama", [0.0] * 32)]
)
def test_factors_that_make_no_sense_are_refused(name: str, factors: list[float]) -> None:
    plain = {key.replace("qwen3.", f"{name}."): value for key, value in PLAIN.items()}
    with pytest.raises(UsageError, match="factors for its RoPE"):
        model_shape(plain | {"general.architecture": name}, factors)
    right = {"general.architecture": "llama"} | {
        key.replace("qwen3.", "llama."): value
        for key, value in PLAIN.items()
        if key != "general.architecture"
    }
    assert model_shape(right, [2.0] * 32).rope_factors == (2.0,) * 32


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [({}, 5000), ({"cells": "1024"}, 1024), ({"cells": "70000"}, 70_000)],
)
def test_how_many_tokens_the_cache_holds_can_be_said(arguments: dict[str, str], cells: int) -> None:
    method = make_method("full", None)
    assert _cells(EngineOptions("m", method, max_live_tokens=5000, engine_args=arguments)) == cells


@pytest.mark.parametrize(
    "arguments",
    [{"cells": "many"}, {"cells": "10"}, {"cells": "9" * 500}, {"cells": ""}, {"n": "1"}],
)
def test_a_wrong_engine_argument_is_one_line(arguments: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"^--engine-arg"):
        _cells(EngineOptions("m", make_method("full", None), engine_args=arguments))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"not a model", "no GGUF file"),
        (packed({"a": 1}, version=9), "no GGUF file"),
        (packed({"name": "long enough"})[:-4], "cut short"),
        (b"", "cut short"),
    ],
)
def test_what_is_no_header_is_one_line(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(PrerequisiteError, match=said):
        read_metadata(path)


def test_a_shape() -> None:
    shape = model_shape(PLAIN)
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim) == (4, 4, 2, 64)
    assert shape.bytes_per_token("float32") == 2 * 4 * 2 * 64 * 4
    assert shape.eos_token_ids == (2,)
    assert not shape.interleaved


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"qwen3.rope.dimension_sections": [16, 24, 24, 0]}, "M-RoPE"),
        ({"qwen3.ssm.state_size": 128}, "recurrent"),
        ({"qwen3.attention.sliding_window": 512}, "sliding-window"),
        ({"qwen3.rope.scaling.type": "longrope"}, "scales RoPE in a way"),
        ({"qwen3.attention.value_length": 32}, "values of 32"),
        ({"general.architecture": "gemma3"}, "not among the architectures"),
    ],
)
def test_traps_6_to_8_models_whose_rows_must_not_be_touched(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        model_shape(PLAIN | change)
    assert "--engine api" in str(refused.value)


def test_trap_11_sets_of_different_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="per query head"):
        refuse_method(make_method("snapkv@original", 256))
    refuse_method(make_method("snapkv", 256))


@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", "cpu"), ("float32", "cuda")])
def test_what_the_build_cannot_do_is_refused(dtype: str, device: str) -> None:
    with pytest.raises(UsageError):
        LlamaCppEngine.check_compute(dtype, device)


@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_pretokenizers_there_and_back(name: str) -> None:
    found = pretokenizer_name({"pre_tokenizer": pretokenizer_of(name)})
    assert PRETOKENIZERS[found] == PRETOKENIZERS[name]  # some have two names


def test_unknown_pretokenizers_are_refused() -> None:
    other = {"type": "Split", "pattern": {"Regex": r"\w+"}}
    with pytest.raises(UsageError, match="does not know"):
        pretokenizer_name({"pre_tokenizer": other})
    with pytest.raises(UsageError, match="kvbench knows"):
        pretokenizer_of("deepseek-llm")


def test_tokenizers_of_other_kinds_are_not_written() -> None:
    with pytest.raises(UsageError, match="'t5'; kvbench reads byte-level"):
        tokenizer_files({"tokenizer.ggml.model": "t5"})


ROUND: dict[str, Any] = PLAIN | {
    "qwen3.rope.freq_base": 100_000,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.token_type": [1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.chat_template": "{{ messages }}",
}
ODD_VALUES: list[Any] = [0, 2**32 - 1, "", "x", [0], ["x"], [2**32 - 1] * 4]


@pytest.mark.parametrize("files", [400, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_damaged_gguf_files_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damaged: Callable[[Random, bytes], bytes],
    files: int,
) -> None:
    """A file is refused with one line, or is a model with a tokenizer."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    path, random, kinds = tmp_path / "m.gguf", Random(files), Counter[str]()
    for number in range(files):
        pairs = dict(ROUND)
        if number % 2:
            name = random.choice(list(pairs))
            pairs[name] = random.choice(ODD_VALUES)
            if random.random() < 0.2:
                del pairs[name]
        whole = packed(pairs)
        path.write_bytes(whole if number % 2 else damaged(random, whole))
        try:
            model = resolve_model(str(path), Path("no-python"))
        except KVBenchError as error:
            kinds["one line" if "\n" not in str(error) else str(error)] += 1
        else:
            kinds["read" if (model.tokenizer / "tokenizer.json").is_file() else "half"] += 1
    assert set(kinds) == {"one line", "read"}
    assert min(kinds.values()) > files // 20


def test_an_array_of_arrays_without_end_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    path.write_bytes(head + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000)
    with pytest.raises(PrerequisiteError, match="damaged or cut short"):
        read_metadata(path)


@pytest.mark.parametrize("kind", [8, 4, 9])
def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    path.write_bytes(head + struct.pack("<IIQ", 9, kind, 2**62) + bytes(64))
    with pytest.raises(PrerequisiteError, match="damaged or cut short"):
        read_metadata(path)
