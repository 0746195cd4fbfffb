"""`/v1/responses`: items in, items or events out, over the sessions that chat has.

A request becomes chat messages and an answer becomes items; nothing below knows of responses. What
`previous_response_id` needs is kept here: the messages of an answered request, and its session.
"""

from __future__ import annotations

import json
import reprlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BaseModel, Field

from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.api_errors import ApiError
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.exchange import Answer, Cancellation, ChatResult, Options
from agentbench_kv.gateway.formats import Format, sse
from agentbench_kv.gateway.messages import text_of, tool_call
from agentbench_kv.gateway.parsing import Delta, Logprob
from agentbench_kv.gateway.requests import (
    CommonRequest,
    Count,
    FlatAnswerFormat,
    MostLogprobs,
    StrictModel,
    ToolMode,
    tool_choice,
)
from agentbench_kv.gateway.session import UnknownSessionError

Messages = list[dict[str, Any]]
_SHOW_LOGPROBS = "message.output_text.logprobs"
_ASSISTANT = ("function_call", "reasoning")


class _TextShape(StrictModel):
    format: FlatAnswerFormat | None = None
    verbosity: Literal["medium"] | None = None


class _FlatNamedTool(StrictModel):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]


class ResponsesRequest(CommonRequest):
    """Body of `POST /v1/responses`."""

    unsupported = CommonRequest.unsupported | {
        "store": (None, False, True),
        "background": (None, False),
        "conversation": (None,),
        "prompt": (None,),
        "max_tool_calls": (None,),
        "truncation": (None, "disabled"),
        "context_management": (None,),
        # Thoughts are the model's own length, and returned whole.
        "reasoning": (None, {}, {"effort": None}, {"summary": None}),
    }

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolMode | _FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: _TextShape | None = None
    include: list[str] | None = None
    top_logprobs: MostLogprobs | None = None
    metadata: dict[str, str] | None = None

    def options(self) -> Options:
        chosen = self.tool_choice
        named = chosen.name if isinstance(chosen, _FlatNamedTool) else ""
        mode = None if isinstance(chosen, _FlatNamedTool) else chosen
        shape = self.text.format if self.text else None
        shown = self.top_logprobs is not None or _SHOW_LOGPROBS in (self.include or ())
        return replace(
            super().options(),
            max_tokens=self.max_output_tokens,
            tool_choice=tool_choice(mode, named, self.parallel_tool_calls),
            answer=shape.answer() if shape else None,
            logprobs=(self.top_logprobs or 0) if shown else None,
        )

    def messages(self) -> Messages:
        """Return what the input adds to the conversation, as chat messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return as_messages(self.input)

    @property
    def resends(self) -> bool:
        """Whether the client keeps the conversation itself and sends all of it each time."""
        return not isinstance(self.input, str) and any(
            item.get("type") in _ASSISTANT or item.get("role") == "assistant" for item in self.input
        )

    def system(self) -> Messages:
        text = self.instructions
        return [{"role": "system", "content": text}] if text is not None else []

    def chat_tools(self) -> Messages | None:
        """Return the tools as chat has them; only functions are known."""
        return [_chat_tool(tool) for tool in self.tools] if self.tools else None


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        kind = reprlib.repr(tool.get("type"))
        message = f"a tool is a function with a name; this one is of type {kind}"
        raise ApiError(400, message, code="unsupported_parameter", param="tools")
    known = ("name", "description", "parameters", "strict")
    kept = {key: tool[key] for key in known if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def as_messages(items: Sequence[Mapping[str, Any]]) -> Messages:
    """Return input items as chat messages.

    Thoughts, text and calls that follow one another are one message of the assistant, as they were
    when the model wrote them.
    """
    messages: Messages = []
    answering = False  # whether the last message is the assistant's and may grow
    for item in items:
        part = _assistant_part(item)
        if part is None:
            messages.append(_other_message(item))
        elif not answering or ("content" in part and messages[-1]["content"]):
            messages.append({"role": "assistant", "content": "", **part})
        else:
            calls = [*messages[-1].get("tool_calls", ()), *part.pop("tool_calls", ())]
            messages[-1] |= {**part, "tool_calls": calls} if calls else part
        answering = part is not None
    return messages


def _assistant_part(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what an item adds to a message of the assistant; None if it is somebody else's."""
    kind = item.get("type", "message")
    if kind == "function_call":
        call = tool_call(*(_string(item, key) for key in ("call_id", "name", "arguments")))
        return {"tool_calls": [call]}
    if kind == "reasoning":
        text = text_of(item.get("content") or item.get("summary"))
        return {"reasoning_content": text} if text else {}
    if kind == "message" and item.get("role") == "assistant":
        return {"content": text_of(item.get("content"))}
    return None


def _other_message(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        result = text_of(item.get("output"))
        return {"role": "tool", "tool_call_id": _string(item, "call_id"), "content": result}
    if kind != "message":
        raise UsageError(f"this server knows no input item of type {reprlib.repr(kind)}")
    return {"role": item.get("role"), "content": text_of(item.get("content"))}


def _string(item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise UsageError(f"an item of type {reprlib.repr(item.get('type'))} needs {key!r}, a text")
    return value


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid4().hex}"


@dataclass
class _TextItem:
    """A reasoning or message item while its text arrives."""

    kind: Literal["reasoning", "content"]
    index: int
    id: str = field(init=False)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)

    _TYPES: ClassVar = {"reasoning": ("rs_", "reasoning_text"), "content": ("msg_", "output_text")}

    def __post_init__(self) -> None:
        prefix, self.type = self._TYPES[self.kind]
        self.id = new_id(prefix)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def part(self) -> dict[str, Any]:
        notes: dict[str, Any] = {"annotations": []} if self._said else {}
        return {"type": self.type, "text": self.text, **self.shown(self.logprobs), **notes}

    def shown(self, tokens: Sequence[Logprob]) -> dict[str, Any]:
        """Return log probabilities, which only a message has."""
        return {"logprobs": [_with_bytes(token) for token in tokens]} if self._said else {}

    def item(self, status: str, *, empty: bool = False) -> dict[str, Any]:
        content = [] if empty else [self.part()]
        if self._said:
            said = {"id": self.id, "type": "message", "role": "assistant"}
            return {**said, "status": status, "content": content}
        common: dict[str, Any] = {"id": self.id, "type": "reasoning", "summary": []}
        return {**common, "content": content, "status": status}

    @property
    def _said(self) -> bool:
        return self.kind == "content"


def _with_bytes(token: Logprob) -> Logprob:
    """Return a token as responses have it: its bytes are a list in any case."""
    top = [{**each, "bytes": each.get("bytes") or []} for each in token.get("top_logprobs") or ()]
    return {**token, "bytes": token.get("bytes") or [], "top_logprobs": top}


def _arguments_of(call: Mapping[str, Any]) -> str:
    return str(call["function"]["arguments"])


def _call_item(item_id: str, call: Mapping[str, Any], status: str) -> dict[str, Any]:
    function = call["function"]
    names = {"call_id": call["id"], "name": function["name"]}
    arguments = "" if status == "in_progress" else _arguments_of(call)
    common = {"id": item_id, "type": "function_call", "status": status}
    return {**common, **names, "arguments": arguments}


class ResponsesFormat(Format):
    """Responses of `/v1/responses`, whole or as events."""

    end = b""

    def __init__(self, model: str, asked: ResponsesRequest, response_id: str) -> None:
        self._asked = asked
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time())}
        self._model = model
        self._output: list[dict[str, Any]] = []
        self._texts: dict[str, _TextItem] = {}
        self._events = 0

    def body(self, result: ChatResult) -> dict[str, Any]:
        for kind, text in (("reasoning", result.reasoning), ("content", result.content)):
            if text:
                list(self._text(Delta(kind, text)))  # type: ignore[arg-type]
        for call in result.tool_calls:
            list(self._call(call))
        return self._finished(result)

    def first(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.call is not None:
            yield from self._call(delta.call)
        else:
            yield from self._text(delta)

    def last(self, result: ChatResult) -> Iterator[dict[str, Any]]:
        response = self._finished(result)
        for text in self._texts.values():
            said = {"text": text.text, **text.shown(text.logprobs)}
            yield self._event(f"response.{text.type}.done", **text.place, **said)
            yield self._event("response.content_part.done", **text.place, part=text.part())
            item = self._output[text.index]
            yield self._event("response.output_item.done", output_index=text.index, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        problem = {"code": error.code or "server_error", "message": error.message}
        response = self._response("failed", error=problem)
        yield self._event("response.failed", response=response)

    def frame(self, chunk: dict[str, Any]) -> bytes:
        return f"event: {chunk['type']}\n".encode() + sse(chunk)

    def _text(self, delta: Delta) -> Iterator[dict[str, Any]]:
        kind: Literal["reasoning", "content"]
        kind = "reasoning" if delta.kind == "reasoning" else "content"
        text = self._texts.get(kind)
        if text is None:
            text = self._texts[kind] = _TextItem(kind, len(self._output))
            item = text.item("in_progress", empty=True)
            self._output.append(item)
            yield self._event("response.output_item.added", output_index=text.index, item=item)
            yield self._event("response.content_part.added", **text.place, part=text.part())
        text.text += delta.text
        text.logprobs += delta.logprobs
        said = {"delta": delta.text, **text.shown(delta.logprobs)}
        yield self._event(f"response.{text.type}.delta", **text.place, **said)

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        index, item_id = len(self._output), new_id("fc_")
        place, arguments = {"item_id": item_id, "output_index": index}, _arguments_of(call)
        begun, done = (_call_item(item_id, call, status) for status in ("in_progress", "completed"))
        self._output.append(done)
        name = "response.function_call_arguments"
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event(f"{name}.delta", **place, delta=arguments)
        yield self._event(f"{name}.done", **place, arguments=arguments, name=done["name"])
        yield self._event("response.output_item.done", output_index=index, item=done)

    def _finished(self, result: ChatResult) -> dict[str, Any]:
        whole = result.finish_reason in ("stop", "tool_calls")
        status = "completed" if whole else "incomplete"
        if result.logprobs is not None and "content" in self._texts:
            self._texts["content"].logprobs = result.logprobs
        for text in self._texts.values():
            self._output[text.index] = text.item(status)
        details = None if whole else {"reason": "max_output_tokens"}
        ended = {"completed_at": int(time.time()), "usage": _usage(result)}
        return self._response(status, incomplete_details=details, **ended)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        asked = self._asked
        text = _plain(asked.text.format if asked.text else None) or {"type": "text"}
        return {
            **self._head,
            "status": status,
            "model": self._model,
            "output": list(self._output),
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "store": asked.store is not False,
            "temperature": asked.temperature or 0.0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "text": {"format": text},
            "tool_choice": _plain(asked.tool_choice) or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in asked.tools or ()],
            "truncation": "disabled",
            **fields,
        }


def _plain(field: object) -> object:
    return field.model_dump(by_alias=True) if isinstance(field, BaseModel) else field


def _usage(result: ChatResult) -> dict[str, Any]:
    usage, turn = result.usage, result.turn
    cached = {"cached_tokens": turn.cached_tokens, "cache_write_tokens": turn.prefill_tokens}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        "kvbench": usage["kvbench"],
    }


PREFIX = "resp_"  # of responses, and of the sessions that are called after their first one
KEPT_SESSIONS = 16
_KEPT_RESPONSES = 4096
_KEPT_CHARACTERS = 64 * 2**20


@dataclass(frozen=True)
class StoredResponse:
    """An answered request: what was said so far, and where the cache of it is."""

    session: str | None  # None if it ended with the request
    messages: tuple[dict[str, Any], ...]  # without instructions, which do not carry over
    size: int  # characters that this response added


class ResponseStore:
    """Answered requests for `previous_response_id`, and the sessions that no client named.

    The session of a response lives on for the one request that continues it. A client that sends
    its whole conversation each time will not ask for it: its requests are as those of chat. All is
    bounded, the oldest goes first. Who continues a response whose session is gone, or that another
    request has continued, gets a new session, computed from its messages. Thread-safe.
    """

    def __init__(self, gateway: AnyGateway) -> None:
        self._gateway = gateway
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0
        self._newest: dict[str, str] = {}  # session -> its last response
        self._resting: OrderedDict[str, int] = OrderedDict()  # unnamed sessions -> live tokens

    def answer(
        self, asked: ResponsesRequest, response_id: str, session: str | None
    ) -> Callable[[Cancellation], Answer]:
        """Return the work of answering; `session` is what the client named."""
        before = self._find(asked.previous_response_id)
        new = asked.messages()
        said = [*(before.messages if before else ()), *new]
        messages, tools, options = asked.system() + said, asked.chat_tools(), asked.options()
        keeps = asked.store is not False
        # Where messages alone say which requests belong together, an id adds nothing.
        unnamed = self._gateway.keeps_conversations or asked.resends or not keeps

        def work(cancel: Cancellation) -> Answer:
            taken = None if session else self._take(asked.previous_response_id, before)
            state = self._state(taken)
            name = session or taken or (None if unnamed else response_id)
            answered = refused = False
            try:
                items = self._gateway.stream(name, messages, tools, options, cancel)
                with closing(items) as stream:  # type: ignore[type-var]
                    for item in stream:
                        # Before the client has the answer, and with it the right to go on.
                        if isinstance(item, ChatResult):
                            history = (*said, item.message)
                            stored = StoredResponse(name, history, _size(new, item))
                            answered = self._keep(response_id, stored) if keeps else False
                        yield item
            except UsageError:
                refused = state is not None and self._state(taken) == state
                raise
            finally:
                if refused:
                    self._put_back(taken, asked.previous_response_id)
                elif not answered:
                    self._close(name)

        return work

    def _find(self, response_id: str | None) -> StoredResponse | None:
        if response_id is None:
            return None
        with self._lock:
            found = self._stored.get(response_id)
        if found is None:
            message = f"no response {response_id!r} is kept here; send the whole conversation"
            code, param = "previous_response_not_found", "previous_response_id"
            raise ApiError(400, message, code=code, param=param)
        return found

    def _take(self, response_id: str | None, before: StoredResponse | None) -> str | None:
        """Return the session to go on in; None if another request has gone on from there."""
        if before is None or before.session is None:
            return None
        with self._lock:
            if self._newest.get(before.session) != response_id:
                return None
            del self._newest[before.session]
            self._resting.pop(before.session, None)
            return before.session

    def _state(self, session: str | None) -> tuple[int, int] | None:
        """Return how many requests and tokens a session has had; None if it is gone."""
        if session is not None:
            with suppress(UnknownSessionError):
                report = self._gateway.report(session)
                return len(report.turns), report.stats.logical
        return None

    def _put_back(self, session: str | None, response_id: str | None) -> None:
        """Let a session rest again where it was, as a request was refused that was to go on in it.

        Whoever asks anew, with what was wrong mended, goes on from its cache.
        """
        if session is None or response_id is None:
            return
        with self._lock:
            self._newest[session] = response_id
        self._rest(session)

    def _keep(self, response_id: str, response: StoredResponse) -> bool:
        """Remember a response, and let its session rest until a request goes on from here."""
        self._add(response_id, response)
        self._rest(response.session)
        return True

    def _rest(self, session: str | None) -> None:
        """Keep a session that no client named until it is gone on in, or there are too many."""
        if session is None or not session.startswith(PREFIX):
            return
        leaving = []
        with suppress(UnknownSessionError):
            live = self._gateway.stats(session).live
            room = self._gateway.engine.pool().get("max_live_tokens", 0) // 2 or None
            with self._lock:
                self._resting[session] = live
                while self._too_many(room):
                    leaving.append(self._resting.popitem(last=False)[0])
        for name in leaving:
            self._close(name)

    def _close(self, session: str | None) -> None:
        """Close a session that no client named."""
        if session is not None and session.startswith(PREFIX):
            with suppress(UnknownSessionError):
                self._gateway.close_report(session)

    def _add(self, response_id: str, response: StoredResponse) -> None:
        with self._lock:
            self._stored[response_id] = response
            if response.session is not None:
                self._newest[response.session] = response_id
            self._size += response.size
            while len(self._stored) > _KEPT_RESPONSES or self._size > _KEPT_CHARACTERS:
                oldest, gone = self._stored.popitem(last=False)
                self._size -= gone.size
                if gone.session is not None and self._newest.get(gone.session) == oldest:
                    del self._newest[gone.session]

    def _too_many(self, room: int | None) -> bool:
        held = sum(self._resting.values())
        full = room is not None and held > room
        return len(self._resting) > KEPT_SESSIONS or (full and bool(self._resting))


def _size(new: Messages, result: ChatResult) -> int:
    return len(json.dumps(new)) + len(result.raw)
