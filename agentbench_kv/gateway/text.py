"""The text gateway: messages go to the engine as they are; usage makes the account."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentbench_kv.engines.base import CUT_OFF, FinishReason, KVStats
from agentbench_kv.engines.text import TextEngine, TextReply, TextSampling
from agentbench_kv.errors import (
    ContextLimitError,
    EndpointError,
    KVBenchError,
    PrerequisiteError,
    UsageError,
)
from agentbench_kv.gateway.base import BaseGateway, Request
from agentbench_kv.gateway.calls import Tools, read_calls
from agentbench_kv.gateway.cursors import question, with_cursors
from agentbench_kv.gateway.dropping import SessionDrops, as_text, drop_key
from agentbench_kv.gateway.exchange import Answer, ChatResult, Options
from agentbench_kv.gateway.grammar import JsonFormat, ToolChoice
from agentbench_kv.gateway.messages import Message, canonical, tool_call
from agentbench_kv.gateway.parsing import Delta, OutputParser
from agentbench_kv.gateway.readers import unread_syntax
from agentbench_kv.gateway.reports import SessionReport, TurnInfo
from agentbench_kv.gateway.session import BaseSession, Known
from agentbench_kv.gateway.sidequest import expired, question_due
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.methods.dropping.sidequest import SideQuestPrompted
from agentbench_kv.phases.syntax import SYNTAXES

Messages = Sequence[Message]


@dataclass
class TextSession(BaseSession):
    """A conversation with an endpoint: what was said, and what that was billed.

    `account` takes the endpoint's word for its tokens: every token of the last request is live.
    """

    account: KVStats = field(default_factory=KVStats)
    tokens_per_character: float = 0.25  # of the last request that the endpoint counted
    cost_beside: float | None = None  # of what its method asked by itself; None without prices

    def estimate(self, text: str) -> int:
        """Return about how many tokens a text is: nobody but the endpoint can count them."""
        return math.ceil(len(text) * self.tokens_per_character)

    def read(self, messages: Sequence[Message], tools: Tools | None, reply: TextReply) -> None:
        """Learn from the endpoint's count how many tokens a character is."""
        size = sum(len(as_text(message)) for message in messages) + len(json.dumps(tools or ""))
        if reply.prompt_tokens and size:
            self.tokens_per_character = reply.prompt_tokens / size

    def rewrite(self, drops: SessionDrops, whole: Messages, shown: Messages) -> None:
        """Put to the account that messages are written anew, shorter than the `whole` of them.

        What the two have in common, tools and template included, is in no estimate: only the
        difference is estimated.
        """
        sizes = [sum(self.estimate(as_text(each)) for each in part) for part in (whole, shown)]
        before = self.stats()
        left = max(0, before.live - max(0, sizes[0] - sizes[1]))
        held = replace(drops.rewritten(before, left), live=left, logical=self.account.logical)
        self.account = self.account.followed_by(held)

    def stats(self) -> KVStats:
        stats = replace(self.account, events=self.account.events.copy())
        return stats if self.drops is None else self.drops.account(stats)

    def report(self, final: KVStats | None = None) -> SessionReport:
        return replace(super().report(final), cost_beside=self.cost_beside)

    def close(self) -> SessionReport:
        self.opened = False
        return self.report()

    def begin(self, asked: Known) -> bool:
        """Take a request; return whether it broke with what was said before."""
        self.opened = True
        reset = self.known is not None and not asked.extends(self.known)
        self.resets += reset
        if self.prompt_sha is None and not self.remembers:
            text = json.dumps([asked.messages, asked.tools], ensure_ascii=True)
            self.prompt_sha = hashlib.sha256(text.encode()).hexdigest()
        return reset

    def add(
        self, reply: TextReply, reason: str, before: KVStats, *, reset: bool, **read: Any
    ) -> TurnInfo:
        """Put one answered (or failed) request to the account, and how it was `read`.

        `before` is the account before anything was done for it.
        """
        prompt, output = reply.prompt_tokens, reply.output_tokens
        fresh = max(prompt - reply.cached_tokens, 0)
        if prompt or output:
            _charge(self.account, prompt, output, fresh)
        if self.drops is not None and (reset or not self.turns):
            self.drops.longest = max(self.drops.longest, prompt - self.drops.told)
        info = TurnInfo(
            turn=len(self.turns),
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=reply.cached_tokens,
            live_before=before.live,
            live_after=self.account.live,
            events=len(self.account.events) - len(before.events),
            evicted=self.account.evicted - before.evicted,
            prefill_tokens=fresh,
            finish_reason=reason,
            reset=reset,
            cost=reply.cost,
            **read,
        )
        self.turns.append(info)
        return info


class TextGateway(BaseGateway[TextSession]):
    """Chat over an engine at text level; see `BaseGateway` for the parameters."""

    engine: TextEngine

    def __init__(
        self, engine: TextEngine, *, policy: DropMethod | None = None, **limits: Any
    ) -> None:
        super().__init__(engine, **limits)
        self._policy = policy

    def provenance(self) -> dict[str, Any]:
        """Return what is known of the endpoint, and that it renders and parses itself."""
        return {
            "tool_parser": "endpoint",
            "phase_family": None,
            "chat_template_sha": None,
            "context_limit": None,
            "determinism": "not promised by the endpoint",
            **self.engine.provenance(),
        }

    def _new_session(self, name: str) -> TextSession:
        state = TextSession(name)
        if self._policy is not None:
            context = self.engine.info.context_limit
            state.drops = SessionDrops(self._policy, context, state.estimate, drop_key(name))
        return state

    def _answer(self, state: TextSession, request: Request) -> Answer:
        """Yield the answer, in one piece of each kind, then the `ChatResult`."""
        name = self.engine.info.name
        if request.prompt is not None:
            raise self._end(
                UsageError(
                    f"the engine {name!r} takes chat messages only, and this task sends raw "
                    "completions; choose the task's chat route (kvbench ls tasks) or another engine"
                )
            )
        if request.options.hints:
            raise UsageError(f"engine {name!r} runs no method that takes hints")
        asked = Known.of_chat(request.messages, request.tools)
        before, reset = state.stats(), state.begin(asked)
        try:
            shown = self._shown(state, request, reset=reset)
            reply = self._ask(replace(request, messages=shown))
        except EndpointError:
            state.add(TextReply(), FinishReason.ENDPOINT_ERROR.value, before, reset=reset)
            raise
        state.read(shown, request.tools, reply)
        result = _result(state, reply, request.tools or (), before, reset=reset)
        state.known = replace(asked, messages=(*asked.messages, canonical(result.message)))
        if state.drops is not None:
            state.drops.seen = len(state.known.messages)
        self._answered(state)
        yield from _deltas(result)
        yield result

    def _shown(self, state: TextSession, request: Request, *, reset: bool) -> Sequence[Message]:
        """Return the messages that are sent: without what the policy has dropped, now or before."""
        drops = state.drops
        if drops is None:
            return request.messages
        drops.seed = request.options.seed
        new = request.messages[0 if reset else drops.seen :]
        fresh = sum(state.estimate(as_text(message)) for message in new)
        wanted = drops.decide(request.messages, state.stats(), fresh, anew=reset)
        ask = partial(self._beside, state, request)
        messages, method = request.messages, drops.method
        if isinstance(method, SideQuestPrompted):
            messages = with_cursors(messages)
        whole = drops.edited(messages)
        if isinstance(method, SideQuestPrompted):
            if question_due(method, drops, request.messages):
                answer = ask([*whole, question(method.trained)], method.fork_tokens)
                wanted |= expired(method, drops, request.messages, answer)
        elif wanted and method.summary_tokens and not drops.summarise(messages, wanted, ask):
            wanted = frozenset()
        drops.dropped |= wanted
        shown = drops.edited(messages)
        if wanted:
            state.rewrite(drops, whole, shown)
        return shown

    def _beside(
        self, state: TextSession, request: Request, asked: Sequence[Message], limit: int
    ) -> str:
        """Ask something beside the session, which pays for it."""
        began = time.perf_counter()
        options = Options(max_tokens=limit, tool_choice=ToolChoice("none"))
        reply = self._ask(replace(request, messages=asked, options=options))
        state.account.auxiliary_calls += 1
        state.account.auxiliary_tokens += reply.prompt_tokens + reply.output_tokens
        state.account.auxiliary_s += time.perf_counter() - began
        if reply.cost is not None:
            state.cost_beside = (state.cost_beside or 0.0) + reply.cost
        if state.drops is not None:  # the beginning of the prompt is the session's
            state.drops.beside(0, reply.prompt_tokens + reply.output_tokens)
        return "" if reply.finish_reason in CUT_OFF else _thoughts(reply)[0]

    def _ask(self, request: Request) -> TextReply:
        options = request.options
        limit, shape = options.max_tokens, (options.temperature, options.top_p, options.top_k)
        limit = limit or self.default_max_tokens
        choice = options.tool_choice
        sampling = TextSampling(
            *(limit, *shape, options.seed, options.stop),
            response_format=None if options.answer is None else _response_format(options.answer),
            tool_choice=_tool_choice(choice) if request.tools else None,
            parallel_tool_calls=None if choice.parallel or not request.tools else False,
            top_logprobs=options.logprobs,
        )
        asked = self.engine.ask(request.messages, request.tools, sampling)
        request.cancellation.attach(asked)
        try:
            return asked.result()
        except ContextLimitError:
            return TextReply(finish_reason=FinishReason.CONTEXT_LIMIT.value)
        except PrerequisiteError as error:
            raise self._end(error) from None

    def _end(self, error: KVBenchError) -> KVBenchError:
        """Remember what ends the run; the first reason counts."""
        if self.ends_run or not isinstance(error, UsageError):
            self._fatal = self._fatal or error
        return error


def _response_format(answer: JsonFormat) -> dict[str, Any]:
    if answer.schema is None:
        return {"type": "json_object"}
    named = {"name": answer.name or "answer", "schema": answer.schema, "strict": answer.strict}
    return {"type": "json_schema", "json_schema": named}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any] | None:
    if choice.name:
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice.mode == "auto" else choice.mode


def _charge(account: KVStats, prompt: int, output: int, fresh: int) -> None:
    """Add a request of `prompt` tokens, `fresh` of them not cached, and its `output` tokens."""
    account.logical = account.live = prompt + output
    account.peak_live = max(account.peak_live, account.live)
    account.prefill_tokens += fresh
    account.longest_prefill = max(account.longest_prefill, fresh)
    account.decode_tokens += output
    account.decode_kv_sum += output * prompt + output * (output + 1) // 2


def _result(
    state: TextSession, reply: TextReply, tools: Tools, before: KVStats, *, reset: bool
) -> ChatResult:
    """Put the reply to the session's account; return it as the gateway's own result."""
    content, reasoning = _thoughts(reply)
    calls, unparsable = _calls(reply.tool_calls)
    if unparsable:
        content = f"{content}\n{json.dumps(reply.tool_calls, ensure_ascii=False)}".strip()
    reason = "tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason
    unread = "" if calls else unread_syntax(content, SYNTAXES["none"], thinking=False, tools=tools)
    turn = state.add(
        reply, reason, before, reset=reset, unparsable=unparsable, unread_syntax=unread
    )
    return ChatResult(
        *(content, reasoning, calls, reason, unparsable, reply.content, [], turn, state.report()),
        *(reply.thinking_tokens, reply.logprobs),
    )


def _thoughts(reply: TextReply) -> tuple[str, str]:
    """Return content and reasoning; an endpoint without a reasoning parser leaves the markers."""
    if reply.reasoning or not reply.content.lstrip().startswith("<think>"):
        return reply.content.strip(), reply.reasoning.strip()
    parser = OutputParser(SYNTAXES["none"], str)
    parser.feed(reply.content)
    parser.finish()
    return parser.content, parser.reasoning


def _calls(raw: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Return the calls with their arguments as JSON text, and whether they could not be read."""
    calls: list[dict[str, Any]] = []
    for number, call in enumerate(raw, start=1):
        function = call.get("function")
        if not isinstance(function, Mapping):
            return [], True
        # Some endpoints leave the arguments of a call without any empty.
        function = {**function, "arguments": function.get("arguments") or {}}
        parsed = read_calls("hermes", json.dumps(function))
        if not parsed:
            return [], True
        name, arguments = parsed[0].name, parsed[0].arguments
        calls.append(tool_call(str(call.get("id") or f"call_{number}"), name, arguments))
    return calls, False


def _deltas(result: ChatResult) -> Iterator[Delta]:
    if result.reasoning:
        yield Delta("reasoning", result.reasoning)
    if result.content:
        yield Delta("content", result.content)
    for call in result.tool_calls:
        yield Delta("tool_call", call=call)
