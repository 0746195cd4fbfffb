"""Prints what llama.cpp makes of a text and of ids, as JSON; run in the environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agentbench_kv.engines.llamacpp.server.context import Context, DecodeBatch
from agentbench_kv.engines.llamacpp.server.library import llama


def main() -> None:
    path, text, ids = Path(sys.argv[1]), sys.argv[2].encode(), json.loads(sys.argv[3])
    limit = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    context = Context(path, cells=512, sequences=2, context_limit=limit)
    binding = llama()
    found = (binding.llama_token * (len(text) + 8))()
    vocabulary = binding.llama_model_get_vocab(context._model)
    count = 0
    if text:
        count = binding.llama_tokenize(vocabulary, text, len(text), found, len(found), False, True)
    every = list(range(len(ids)))
    logits = context.decode(DecodeBatch(ids, every, [0] * len(ids), every))
    document = {
        "ids": list(found[:count]),
        "logits": logits.tolist(),
        "ends": list(context.shape.eos_token_ids),
    }
    sys.stdout.write(json.dumps(document))


if __name__ == "__main__":
    main()
