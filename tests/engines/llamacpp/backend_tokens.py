"""Runs in the environment: what llama.cpp makes of texts, with the vocabulary of a file.

`python backend_tokens.py FILE prefix|plain < texts.json` prints ids and text back of every text.
"""

from __future__ import annotations

import json
import sys
from ctypes import create_string_buffer
from typing import Any

from agentbench_kv.engines.llamacpp.server.library import llama


def main() -> None:
    binding = llama()
    options = binding.llama_model_default_params()
    options.vocab_only = True
    model = binding.llama_model_load_from_file(sys.argv[1].encode(), options)
    if not model:
        raise SystemExit(f"llama.cpp cannot load the vocabulary of {sys.argv[1]}")
    vocabulary = binding.llama_model_get_vocab(model)
    found = []
    for text in json.load(sys.stdin):
        data = text.encode()
        ids = (binding.llama_token * (len(data) + 16))()
        count = binding.llama_tokenize(vocabulary, data, len(data), ids, len(ids), False, True)
        pieces = [piece(vocabulary, token, i == 0) for i, token in enumerate(ids[:count])]
        found.append([ids[:count], b"".join(pieces).decode("utf-8", "replace")])
    sys.stdout.write(json.dumps(found))


def piece(vocabulary: Any, token: int, first: bool) -> bytes:
    """A token's bytes, without the first one's space where the tokenizer puts one in front."""
    buffer = create_string_buffer(4096)
    strip = int(first and sys.argv[2] == "prefix")
    size = llama().llama_token_to_piece(vocabulary, token, buffer, len(buffer), strip, True)
    return buffer.raw[:size]


main()
