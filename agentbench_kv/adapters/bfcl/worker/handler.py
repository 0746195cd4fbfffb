"""The official multi-turn loop over one session of a server, and the official checker.

Two routes. `RawSessionHandler` keeps one append-only text and sends it to the completions route,
whose server reads the calls. `ChatHandler` keeps messages and sends them to the chat route with
tools in the OpenAI schema.
The loop passes `data` from method to method; what we keep is in the handler instead.
"""

# ruff: noqa: N802, ARG002  the official loop names the methods and chooses their arguments

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from bfcl_eval.constants.enums import ModelStyle
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.agentic_eval.agentic_checker import agentic_checker
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.model_handler.base_handler import BaseHandler
from bfcl_eval.model_handler.utils import convert_to_tool

from ...agent_client import AgentConnection, Completion, ContextFullError, unparsable
from .session import PromptText, all_tools, as_text, parse, to_python, tool_names, unmarked

_NOT_AN_OBJECT = "Error during execution: the arguments are not a JSON object"
# Under which BFCL keeps a trial's simulators, in globals of a module that it never clears. It can
# surface in a tool's result, so it is the same in every trial; each has a process of its own.
NAME = "kvbench0"
Fields = dict[str, Any]
Check = Callable[[list[list[str]]], Fields]  # the verdict on the texts of the turns so far


class DecidedError(Exception):
    """The turns so far are wrong, so that the session is, whatever follows."""

    def __init__(self, verdict: Fields) -> None:
        super().__init__("the session is wrong already")
        self.verdict = verdict


class SessionHandler(BaseHandler):  # type: ignore[misc]  # bfcl_eval has no types
    """What both routes share: which calls may run, and a record per completion."""

    function_calling = False

    def __init__(
        self, entry: Fields, line: AgentConnection, syntax: str, check: Check | None = None
    ) -> None:
        super().__init__(NAME, 0.0, NAME, is_fc_model=self.function_calling)
        self.steps: list[Fields] = []  # one record per completion
        self.texts: list[list[str]] = [[]]  # what the checker reads, by turn and step
        self._check = check
        self._known = tool_names(entry)
        self._line = line
        self._turn = 0

    def decode_execute(self, result: str, has_tool_call_tag: bool = False) -> list[str]:
        """Turn visible text into the source lines that the executor evaluates."""
        calls, _ = parse(result)
        return [to_python(call, self._known) for call in calls]

    def said(self) -> Any:
        """Return the whole session: text, or a list of messages."""
        raise NotImplementedError

    def _read(self, answer: Completion) -> Fields:
        """Record a completion; return what the loop reads of it, calls in the form of `parse`."""
        said = answer.message.get("tool_calls")
        shown = as_text(said) if said else unmarked(str(answer.message.get("content") or ""))
        calls, broken = parse(shown)
        self.steps.append({
            "turn": self._turn,
            "calls": [{"name": c.name, "arguments": c.arguments} for c in calls],
            "refused": sum(c.name not in self._known for c in calls),
            "unparsable": broken + unparsable(answer),
            "finish_reason": answer.finish_reason,
            "seconds": round(answer.seconds, 4),
            "usage": answer.usage,
            "results": [],
        })  # fmt: skip
        self.texts[-1].append(shown)
        if answer.finish_reason == "context_limit":
            self._keep(answer.said)
            raise ContextFullError("the session reached the model's last position")
        return {
            "model_responses": shown,
            "said": answer.said,
            "input_token": answer.usage.get("prompt_tokens", 0),
            "output_token": answer.usage.get("completion_tokens", 0),
        }

    def _next_turn(self) -> None:
        """Begin a turn; DecidedError if those before it are checked and wrong."""
        if self._check is not None:
            found = self._check(self.texts)
            if not found["valid"]:
                raise DecidedError(found)
        self._turn += 1
        self.texts.append([])

    def _keep(self, said: Any) -> None:
        """Append what the model said to the session."""
        raise NotImplementedError


class RawSessionHandler(SessionHandler):
    """The raw route: every prompt extends the one before to the letter."""

    def __init__(
        self, entry: Fields, line: AgentConnection, syntax: str, check: Check | None = None
    ) -> None:
        super().__init__(entry, line, syntax, check)
        self._text = PromptText(entry["function"], syntax)
        self._tools = openai_tools(all_tools(entry))

    def said(self) -> str:
        return self._text.text

    def _keep(self, said: str) -> None:
        self._text.add_generated(said)

    def _pre_query_processing_prompting(self, test_entry: Fields) -> Fields:
        return {"id": test_entry["id"]}

    def add_first_turn_message_prompting(self, data: Fields, messages: list[Fields]) -> Fields:
        self._text.begin([m["content"] for m in messages if m["role"] == "system"])
        self._add([m for m in messages if m["role"] != "system"])
        return data

    def _add_next_turn_user_message_prompting(self, data: Fields, messages: list[Fields]) -> Fields:
        self._next_turn()
        self._add(messages)
        return data

    def _add(self, messages: list[Fields]) -> None:
        for message in messages:
            self._text.add(message["role"], message["content"])

    def _query_prompting(self, data: Fields) -> tuple[Completion, float]:
        answer = self._line.complete(self._text.prompt(), self._tools)
        return answer, answer.seconds

    def _parse_query_response_prompting(self, answer: Completion) -> Fields:
        return self._read(answer)

    def _add_assistant_message_prompting(self, data: Fields, response: Fields) -> Fields:
        self._keep(response["said"])
        return data

    def _add_execution_results_prompting(
        self, data: Fields, results: list[str], response: Fields
    ) -> Fields:
        self.steps[-1]["results"] = list(results)
        self._text.add_results(results)
        return data


class ChatHandler(SessionHandler):
    """The chat route: assistant messages go back exactly as the server gave them."""

    function_calling = True

    def __init__(
        self, entry: Fields, line: AgentConnection, syntax: str, check: Check | None = None
    ) -> None:
        super().__init__(entry, line, syntax, check)
        self._messages: list[Fields] = []
        self._tools: list[Fields] = []

    def said(self) -> list[Fields]:
        return self._messages

    def _keep(self, said: Fields) -> None:
        self._messages.append(said)

    def _pre_query_processing_FC(self, data: Fields, test_entry: Fields) -> Fields:
        return data

    def _compile_tools(self, data: Fields, test_entry: Fields) -> Fields:
        self._tools = openai_tools(test_entry["function"])
        return data

    def add_first_turn_message_FC(self, data: Fields, messages: list[Fields]) -> Fields:
        self._messages.extend(messages)
        return data

    def _add_next_turn_user_message_FC(self, data: Fields, messages: list[Fields]) -> Fields:
        self._next_turn()
        self._messages.extend(messages)
        return data

    def _query_FC(self, data: Fields) -> tuple[Completion, float]:
        answer = self._line.chat(self._messages, self._tools)
        return answer, answer.seconds

    def _parse_query_response_FC(self, answer: Completion) -> Fields:
        return self._read(answer)

    def _add_assistant_message_FC(self, data: Fields, response: Fields) -> Fields:
        self._keep(response["said"])
        return data

    def _add_execution_results_FC(
        self, data: Fields, results: list[str], response: Fields
    ) -> Fields:
        self.steps[-1]["results"] = list(results)
        left = iter(results)
        for call in response["said"].get("tool_calls") or ():
            ran = bool(parse(as_text([call]))[0])
            content = next(left, _NOT_AN_OBJECT) if ran else _NOT_AN_OBJECT
            answered = {"role": "tool", "tool_call_id": call.get("id"), "content": content}
            self._messages.append(answered)
        return data


def openai_tools(functions: Sequence[Fields]) -> list[Fields]:
    style = ModelStyle.OPENAI_COMPLETIONS
    return list(convert_to_tool(deepcopy(functions), GORILLA_TO_OPENAPI, style))


def simulators(sample: str) -> dict[str, Any]:
    """Return the running conversation's simulators."""
    prefix = re.sub(r"[-./:]", "_", f"{NAME}_{sample}_")
    return {key: held for key, held in vars(multi_turn_utils).items() if key.startswith(prefix)}


def verdict(
    entry: Fields, ground_truth: Sequence[Sequence[str]], texts: Sequence[Sequence[str]]
) -> Fields:
    """Run the official checker on the visible texts, by turn and step."""
    tools = tool_names(entry)
    steps = [[parse(text)[0] for text in turn] for turn in texts]
    lines = [[[to_python(c, tools) for c in calls] for calls in turn if calls] for turn in steps]
    category = entry["id"].rsplit("_", 1)[0]
    return dict(multi_turn_checker(lines, ground_truth, entry, category, NAME))


def verdict_so_far(
    entry: Fields, ground_truth: Sequence[Sequence[str]], texts: Sequence[Sequence[str]]
) -> Fields:
    """Run the official checker on the first turns alone, and forget that it ran.

    It goes turn by turn and stops at the first wrong one, so turns that follow change nothing.
    """
    held = vars(multi_turn_utils)
    before = set(held)
    try:
        return verdict(entry, ground_truth[: len(texts)], texts)
    finally:
        # Its simulators are globals, which the next check would go on with.
        for key in set(held) - before:
            del held[key]


def answer_verdict(possible: Sequence[str], texts: Sequence[str]) -> Fields:
    """Run the official checker of web search and memory on the last text without calls."""
    answers = [text for text in texts if not parse(text)[0]]
    if not answers or not answers[-1]:
        return {"valid": False, "error_type": "agentic:no_last_message"}
    return dict(agentic_checker(answers[-1], list(possible)))
