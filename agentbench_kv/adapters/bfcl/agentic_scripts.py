"""Agents of web search and memory whose score is known in advance, as raw assistant texts.

`gold` uses the tools and answers with the first answer that counts; `corrupt` uses the tools and
says that it does not know; `null` says one sentence a turn and calls nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .calls import Call
from .scripts import FINISHED, NULL_SENTENCE, say

_STORED = 300  # characters of a conversation
_UNKNOWN = {"answer": "I do not know", "context": "I do not know"}
# What stores in each memory backend, and what looks into it.
_TOOLS = {
    "kv": ("archival_memory_add", "archival_memory_list_keys"),
    "vector": ("archival_memory_add", "archival_memory_retrieve"),
    "rec_sum": ("memory_append", "memory_retrieve"),
}


def search_script(agent: str, truth: Mapping[str, Any]) -> list[str]:
    """Write the texts of a web search: each hop of `truth["source"]` is a query and a page."""
    if agent == "null":
        return [NULL_SENTENCE]
    steps = []
    for hop in truth["source"]:
        steps.append(Call("search_engine_query", {"keywords": hop["subquestion"]}))
        steps.append(Call("fetch_url_content", {"url": hop["source"], "mode": "truncate"}))
    return [*map(say, steps), _answer(agent, truth["ground_truth"])]


def question_script(agent: str, backend: str, question: str, answers: Sequence[str]) -> list[str]:
    """Write the texts of a memory question: one look into the memory, then the answer."""
    if agent == "null":
        return [NULL_SENTENCE]
    _, look = _TOOLS[backend]
    arguments = {"query": question} if backend == "vector" else {}
    return [say(Call(look, arguments)), _answer(agent, answers)]


def conversation_script(agent: str, backend: str, entry: Mapping[str, Any]) -> list[str]:
    """Write the texts of a prerequisite conversation: its beginning is stored, the rest heard."""
    turns = entry["question"]
    if agent == "null":
        return [NULL_SENTENCE for _ in turns]
    text = turns[0][-1]["content"][:_STORED]
    arguments = {"text": text}
    if backend == "kv":
        arguments = {"key": re.sub(r"[^a-z0-9]+", "_", entry["id"].lower()), "value": text}
    add, _ = _TOOLS[backend]
    return [say(Call(add, arguments)), *(FINISHED for _ in turns)]


def _answer(agent: str, answers: Sequence[str]) -> str:
    found = {"answer": answers[0], "context": "It was looked up."}
    fields = json.dumps(_UNKNOWN if agent == "corrupt" else found, ensure_ascii=False)
    return f"<think>\nThat is all there is.\n</think>\n\n{fields}"
