"""The codec against the tokenizer's own `encode`, from many threads, whatever its file says."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer

MICRO = Path("agentbench_kv/models/micro").resolve()
TEXTS = st.text(max_size=200) | st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool_call>", "a b", "é", "😀", "\n", "  "]),
    max_size=20,
).map("".join)


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(load_tokenizer(MICRO))


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_ids_are_the_tokenizer_s_own(codec: TokenCodec, text: str) -> None:
    encodable = text.encode("utf-8", "replace").decode()
    own = load_tokenizer_once().encode(encodable, add_special_tokens=False)
    assert codec.encode(encodable) == list(own)


_KEPT: list[Any] = []


def load_tokenizer_once() -> Any:
    if not _KEPT:
        _KEPT.append(load_tokenizer(MICRO))
    return _KEPT[0]


def test_a_file_that_truncates_and_pads_does_not(tmp_path: Path) -> None:
    shutil.copytree(MICRO, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    document = json.loads(file.read_text())
    document["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    document["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|im_end|>",
    }  # fmt: skip
    file.write_text(json.dumps(document))
    text = "one two three four five six seven"
    whole = TokenCodec(load_tokenizer(MICRO)).encode(text)
    assert TokenCodec(load_tokenizer(tmp_path / "model")).encode(text) == whole
    assert len(whole) > 4


def test_many_threads_get_their_own_ids(codec: TokenCodec) -> None:
    texts = [f"session {i} says {'word ' * (i % 50)}" for i in range(400)]
    alone = [codec.encode(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(codec.encode, texts)) == alone
