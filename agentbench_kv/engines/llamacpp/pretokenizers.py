"""Pre-tokenizers that both tokenizer.json and GGUF can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentbench_kv.errors import UsageError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

PRETOKENIZERS: Mapping[str, str] = {
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
}
"""Names of llama.cpp with the regular expression each splits text by before byte-level BPE."""

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def pretokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    """Return what llama.cpp calls the pre-tokenizer of a tokenizer.json.

    UsageError if llama.cpp would split text otherwise, or is not known to split it alike.
    """
    parts = tokenizer.get("pre_tokenizer") or {}
    steps = parts.get("pretokenizers", [parts])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    for name, pattern in PRETOKENIZERS.items():
        if patterns == [pattern]:
            return name
    raise UsageError(
        "the tokenizer splits text in a way kvbench convert does not know "
        f"({', '.join(map(str, patterns)) or parts.get('type', 'no pre-tokenizer')}); "
        "use the converter of llama.cpp itself"
    )


def pretokenizer_of(name: str) -> dict[str, Any]:
    """Return the pre-tokenizer of tokenizer.json for a name of llama.cpp."""
    if name not in PRETOKENIZERS:
        known = ", ".join(PRETOKENIZERS)
        raise UsageError(f"the file's pre-tokenizer is {name!r}; kvbench knows: {known}")
    split = {
        "type": "Split",
        "pattern": {"Regex": PRETOKENIZERS[name]},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}
