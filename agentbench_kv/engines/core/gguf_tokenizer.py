"""The tokenizer of a GGUF file, in Hugging Face's form."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentbench_kv.engines.core.gguf_header import (
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    damaged,
    file_sha,
    read_metadata,
)
from agentbench_kv.environments import home
from agentbench_kv.errors import PrerequisiteError, UsageError

_VERSION = 2  # of what is written; folders of another one are left alone

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# A word in lower case behind capitals, as llama.cpp writes it: capitals are those of ASCII.
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?((?=[\p{{L}}])([^a-z]))*((?=[\p{{L}}])([^A-Z]))+{0}"
    r"|[^\r\n\p{{L}}\p{{N}}]?((?=[\p{{L}}])([^a-z]))+((?=[\p{{L}}])([^A-Z]))*{0}"
)
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
# llama.cpp's names with the regular expressions each splits text by, one after the other, before
# byte-level BPE.
PRETOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "glm4": (_LLAMA3,),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "tekken": (rf"{_CASED.format('')}|\p{{N}}|{_SLASHES}",),
    "gpt-4o": (rf"{_CASED.format(_ENDINGS)}|\p{{N}}{{1,3}}|{_SLASHES}",),
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "glm4", "tekken")  # that are tokens stay whole
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


_SPACE = "\u2581"  # SentencePiece's space
_PHI_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def pretokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a pre-tokenizer; UsageError if it might split text otherwise."""
    parts = tokenizer.get("pre_tokenizer") or {}
    steps = parts.get("pretokenizers", [parts])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    for name, known in PRETOKENIZERS.items():
        if patterns == [*known]:
            return name
    raise UsageError(
        "the tokenizer splits text in a way kvbench convert does not know "
        f"({', '.join(map(str, patterns)) or parts.get('type', 'no pre-tokenizer')}); "
        "use the converter of llama.cpp itself"
    )


def pretokenizer_of(name: str) -> dict[str, Any]:
    if name not in PRETOKENIZERS:
        known = ", ".join(PRETOKENIZERS)
        raise UsageError(f"the file's pre-tokenizer is {name!r}; kvbench knows: {known}")
    plain = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [plain | {"pattern": {"Regex": pattern}} for pattern in PRETOKENIZERS[name]]
    return {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]}


def tokenizer_folder(path: Path) -> Path:
    """Return a folder with the tokenizer of a GGUF file, written once; PrerequisiteError if not."""
    folder = home() / "gguf" / f"tokenizer-{file_sha(path)[:16]}-{_VERSION}"
    if (folder / "tokenizer_config.json").exists():
        return folder
    try:
        return write_tokenizer(read_metadata(path), folder)
    except OSError as error:
        raise PrerequisiteError(f"cannot write {folder}: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise damaged(path) from None  # a value of another type, or one that is not there


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
    if kind not in _MODELS:
        known = "byte-level BPE (gpt2) and SentencePiece's BPE (llama)"
        raise UsageError(f"the file's tokenizer is {str(kind)[:40]!r}; kvbench reads {known}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": _added(metadata, tokens, types),
        "post_processor": None,
        **_MODELS[kind](metadata, tokens, types),
    }
    files = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_config(metadata, tokens)),
    }
    if template := metadata.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template
    return files


def _added(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> list[dict[str, Any]]:
    """Return the tokens that are found in text before anything else."""
    # llama.cpp goes by the name, too: https://github.com/ggml-org/llama.cpp, _set_token_attr.
    name = str(metadata.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name
    plain = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return [
        {
            "id": index,
            "content": tokens[index],
            **plain,
            "rstrip": strips and tokens[index] not in _PHI_KEEPS_SPACE,
            "special": kind != USER_DEFINED,
        }
        for index, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    # Added tokens too: one that the vocabulary lacks would get the next free id.
    words = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    merges = [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]]
    whole = pre in _WHOLE_WORDS
    return {
        "normalizer": None,
        "pre_tokenizer": pretokenizer_of(pre),
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "ignore_merges": whole, "vocab": words, "merges": merges},
    }


def _sentence_pieces(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> dict[str, Any]:
    """Return a BPE whose merges go by the tokens' scores, bytes for what has no token."""
    words = {token: i for i, token in enumerate(tokens)}
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in words]
    if missing:
        raise UsageError(f"the file's tokenizer has no token for {len(missing)} of 256 bytes")
    scores = metadata["tokenizer.ggml.scores"]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    space: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] * prefix
    space += [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    unknown = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None
    )
    model = {
        "type": "BPE",
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": words,
        "merges": _merges(words, scores),
    }
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    ]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": space},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": model,
    }


def _merges(words: Mapping[str, int], scores: list[float]) -> list[list[str]]:
    """Return every pair of tokens that makes a token, best score first."""
    pairs = [
        (-scores[index], index, cut)
        for token, index in words.items()
        for cut in range(1, len(token))
        if token[:cut] in words and token[cut:] in words
    ]
    by_index = {index: token for token, index in words.items()}
    return [[by_index[i][:cut], by_index[i][cut:]] for _, i, cut in sorted(pairs)]


_MODELS = {"gpt2": _byte_level, "llama": _sentence_pieces}


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
