"""The samples of an official category, and agents whose score on them is known in advance.

An agent is its raw assistant texts, one per completion.

`gold` plays the ground truth, or uses the tools and gives the first answer that counts; `corrupt`
leaves out the last call of the first turn that has calls (the checker rejects every one), or says
that it does not know; `null` says one sentence a turn and calls nothing.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...agent_client import NULL_SENTENCE, call_text, think_block
from .session import WrittenCall

FINISHED = think_block("Nothing is left to do in this turn.") + "Done."
_STEPS = 20
_STORED = 300  # characters of a conversation
_UNKNOWN = {"answer": "I do not know", "context": "I do not know"}
# What stores in each memory backend, and what looks into it.
_TOOLS = {
    "kv": ("archival_memory_add", "archival_memory_list_keys"),
    "vector": ("archival_memory_add", "archival_memory_retrieve"),
    "rec_sum": ("memory_append", "memory_retrieve"),
}


@dataclass(frozen=True)
class Category:
    """A loaded category: samples and memory's prerequisite conversations by id."""

    name: str  # official, such as `multi_turn_base`
    entries: dict[str, dict[str, Any]]
    truth: dict[str, dict[str, Any]]  # by sample id, in the official order

    @classmethod
    def of(
        cls, name: str, entries: Iterable[dict[str, Any]], truth: Iterable[dict[str, Any]]
    ) -> Category:
        """Match samples and ground truth; the agentic categories share files of other ids."""
        kind = kind_of(name)
        shared = name if kind == "multi_turn" else kind
        renamed = {each["id"].replace(shared, name, 1): each for each in truth}
        return cls(name, {each["id"]: each for each in entries}, renamed)

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    def files(self) -> list[str]:
        """Return the data files, relative to the benchmark's data folder."""
        name = f"BFCL_v4_{self.name if self.kind == 'multi_turn' else self.kind}.json"
        scenarios = sorted({entry.get("scenario", "") for entry in self.entries.values()} - {""})
        chats = [f"memory_prereq_conversation/memory_{scenario}.json" for scenario in scenarios]
        return [name, f"possible_answer/{name}", *chats]

    def configured(
        self, entry: dict[str, Any], snapshot: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Give an entry the initial state that the official command line would give it."""
        if self.kind == "web_search":
            settings: dict[str, Any] = {"show_snippet": "no_snippet" not in self.name}
        elif self.kind == "memory":
            settings = {"snapshot": snapshot}
        else:
            return entry
        return {**entry, "initial_config": {entry["involved_classes"][0]: settings}}


def kind_of(category: str) -> str:
    return next(kind for kind in ("multi_turn", "web_search", "memory") if kind in category)


def script(
    agent: str, ground_truth: Sequence[Sequence[str]], tools: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Write the texts of a multi-turn sample.

    The ground truth is calls of each turn, as Python source; `tools` name positional arguments.
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


def say(*calls: WrittenCall) -> str:
    names = ", ".join(dict.fromkeys(call.name for call in calls))
    written = "\n".join(call_text(call.name, call.arguments) for call in calls)
    return think_block(f"The next step needs {names}.") + written


def _parse(source: str, names: Mapping[str, list[str]]) -> WrittenCall:
    call = ast.parse(source, mode="eval").body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise ValueError(f"not a plain call in the ground truth: {source}")
    values = map(ast.literal_eval, call.args)
    arguments = dict(zip(names[call.func.id], values, strict=False))
    named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return WrittenCall(call.func.id, arguments | named)


def search_script(agent: str, truth: Mapping[str, Any]) -> list[str]:
    """Write the texts of a web search: each hop of `truth["source"]` is a query and a page."""
    if agent == "null":
        return [NULL_SENTENCE]
    steps = []
    for hop in truth["source"]:
        steps.append(WrittenCall("search_engine_query", {"keywords": hop["subquestion"]}))
        steps.append(WrittenCall("fetch_url_content", {"url": hop["source"], "mode": "truncate"}))
    return [*map(say, steps), _answer(agent, truth["ground_truth"])]


def question_script(agent: str, backend: str, question: str, answers: Sequence[str]) -> list[str]:
    """Write the texts of a memory question: one look into the memory, then the answer."""
    if agent == "null":
        return [NULL_SENTENCE]
    _, look = _TOOLS[backend]
    arguments = {"query": question} if backend == "vector" else {}
    return [say(WrittenCall(look, arguments)), _answer(agent, answers)]


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
    return [say(WrittenCall(add, arguments)), *(FINISHED for _ in turns)]


def _answer(agent: str, answers: Sequence[str]) -> str:
    found = {"answer": answers[0], "context": "It was looked up."}
    fields = json.dumps(_UNKNOWN if agent == "corrupt" else found, ensure_ascii=False)
    return think_block("That is all there is.") + fields
