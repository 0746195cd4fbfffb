"""A Hugging Face tokenizer folder out of a GGUF file: the gateway speaks that language."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentbench_kv.engines.llamacpp.pretokenizers import BYTE_LEVEL, pretokenizer_of
from agentbench_kv.errors import UsageError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of GGUF


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> Path:
    """Write the files of a GGUF file's tokenizer into `folder`, each in one step; return it."""
    files = tokenizer_files(metadata)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        handle, draft = tempfile.mkstemp(dir=folder, prefix=f".{name}")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(folder / name)
    return folder


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text of the files, from the `tokenizer.*` keys of a GGUF header."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UsageError(
            f"the file's tokenizer is {kind!r}; the llamacpp engine reads byte-level BPE (gpt2)"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    files = {
        "tokenizer.json": json.dumps(_tokenizer(metadata, tokens, types), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_config(metadata, tokens)),
    }
    template = metadata.get("tokenizer.chat_template")
    if template:
        files["chat_template.jinja"] = template
    return files


def _tokenizer(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": index, "content": tokens[index], **plain, "special": kind == CONTROL}
        for index, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    model = {
        "type": "BPE",
        "ignore_merges": pre == "llama-bpe",
        # Added tokens too: one that the vocabulary lacks would get the next free id.
        "vocab": {token: i for i, token in enumerate(tokens) if types[i] != UNUSED},
        "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
    }
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pretokenizer_of(pre),
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": model,
    }


def _config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{role}_token"] = tokens[index]
    return config
