"""Agents whose score is known in advance, written out as raw assistant texts.

Agents of web search and memory whose score is known in advance, as raw assistant texts.

`gold` uses the tools and answers with the first answer that counts; `corrupt` uses the tools and
says that it does not know; `null` says one sentence a turn and calls nothing.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .session import Call, marked, payload_of

NULL_SENTENCE = "I am sorry, I cannot help with this."
FINISHED = "<think>\nNothing is left to do in this turn.\n</think>\n\nDone."
_STEPS = 20


def script(
    agent: str, ground_truth: Sequence[Sequence[str]], tools: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Write the texts that `agent` says, one per completion.

    `gold` plays the ground truth (calls of each turn, as Python source), `corrupt` leaves out the
    last call of the first turn that has calls (the checker rejects every one), `null` says one
    sentence a turn and calls nothing. `tools` give the names of positional arguments.
    """
    if agent == "null":
        return [NULL_SENTENCE for _ in ground_truth]
    turns = list(ground_truth)
    if agent == "corrupt":
        first = next(i for i, turn in enumerate(turns) if turn)
        turns[first] = turns[first][:-1]
    names = {tool["name"]: list(tool["parameters"]["properties"]) for tool in tools}
    return [text for turn in turns for text in _turn(turn, names)]


def _turn(calls: Sequence[str], names: Mapping[str, list[str]]) -> list[str]:
    parsed = [_parse(call, names) for call in calls]
    # The loop gives up after 20 steps, and some turns have more calls than that.
    width = max(1, math.ceil(len(parsed) / _STEPS))
    steps = [parsed[i : i + width] for i in range(0, len(parsed), width)]
    return [*(say(*step) for step in steps), FINISHED]


def say(*calls: Call) -> str:
    names = ", ".join(dict.fromkeys(call.name for call in calls))
    written = "\n".join(marked(payload_of(call.name, call.arguments)) for call in calls)
    return f"<think>\nThe next step needs {names}.\n</think>\n\n{written}"


def _parse(source: str, names: Mapping[str, list[str]]) -> Call:
    call = ast.parse(source, mode="eval").body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise ValueError(f"not a plain call in the ground truth: {source}")
    values = map(ast.literal_eval, call.args)
    arguments = dict(zip(names[call.func.id], values, strict=False))
    named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return Call(call.func.id, arguments | named)


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
