"""Golden answers in the syntax that the model is read in, not in that of the script."""

from __future__ import annotations

import json

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.run.recordings import record_gold

TASK = "micro/recall-1k"


def test_json_is_written_where_json_is_read() -> None:
    """The checker finds the answers right, so every session is recorded, as it was meant."""
    codec = TokenCodec(load_tokenizer(model_path("micro")))
    found = {
        syntax: record_gold(TASK, "micro", 2, {}, syntax) for syntax in ("auto", "hermes", "json")
    }
    assert found["auto"] == found["hermes"]
    texts = {
        syntax: [codec.decode([token for token, _ in turn.answer]) for turn in each[0].turns]
        for syntax, each in found.items()
    }
    assert len(found["json"]) == 2
    assert len(texts["json"]) == len(texts["hermes"])
    calls = [text for text in texts["hermes"] if "<tool_call>" in text]
    written = [text for text in texts["json"] if "```" in text or '"arguments"' in text]
    assert len(calls) == len(written) > 3
    assert not any("<tool_call>" in text for text in texts["json"])
    first = json.loads(calls[0].partition("<tool_call>")[2].partition("</tool_call>")[0])
    assert json.dumps(first["name"]) in written[0]
