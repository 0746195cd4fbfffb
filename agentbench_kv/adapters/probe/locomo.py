"""LoCoMo's questions, each asked behind the same conversation, which is read once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentbench_kv.adapters.base import PastSession, Reading, RememberingClient, TrialContext
from agentbench_kv.adapters.locomo.data import Dialogue, Question
from agentbench_kv.adapters.locomo.figures import Answered
from agentbench_kv.adapters.locomo.task import DialogueHistory, LocomoQA, ask
from agentbench_kv.adapters.probe.asking import question as put
from agentbench_kv.adapters.probe.asking import read
from agentbench_kv.adapters.probe.session import ChatSession
from agentbench_kv.adapters.probe.task import steered
from agentbench_kv.errors import ContextLimitError

READ = "I have read the conversation."


@dataclass(kw_only=True)
class ProbeLocomo(LocomoQA):
    """A sample is a conversation. No question sees another one or its answer."""

    name = "probe/locomo"
    summary = "LoCoMo's questions, each asked behind the conversation alone (data from the user)"
    needs: ClassVar[frozenset[str]] = frozenset({"force"})
    remembers: ClassVar[bool] = True

    def _reading(self) -> Reading | None:
        return None  # questions are asked in sessions beside this one

    def _play(
        self, conversation: Dialogue, questions: Sequence[Question], context: TrialContext
    ) -> Iterator[Answered]:
        if isinstance(context.client, RememberingClient) and context.client.remembers:
            yield from self._play_memory(conversation, questions, context, context.client)
            return
        client = steered(self.name, context)
        # An answer ends the reading: what is forked is a session between two turns.
        before = self._history(conversation)
        messages = (*before.messages, {"role": "assistant", "content": READ})
        session = ChatSession(conversation.id, messages)
        try:
            if client.forks:
                read(client, session, [])
            for number, each in enumerate(questions):
                started = time.perf_counter()
                last = number == len(questions) - 1 and not client.forks
                line = client if last else client.fork() if client.forks else client.another()
                if not client.forks:
                    read(line, session, [])
                reply = put(line, session, str(ask(each)["content"]), context.max_tokens)
                if line is not client:
                    line.close()
                seconds = time.perf_counter() - started
                yield self._answered(conversation, each, reply, seconds, before.spots)
        except ContextLimitError:
            return

    def _play_memory(
        self,
        conversation: Dialogue,
        questions: Sequence[Question],
        context: TrialContext,
        client: RememberingClient,
    ) -> Iterator[Answered]:
        """Have every session of the conversation read by itself, then ask each question alone."""
        before = self._history(conversation)
        for past in self._past(conversation, before):
            client.remember(past)
        for number, each in enumerate(questions):
            started = time.perf_counter()
            line = client if number == len(questions) - 1 else client.another()
            asked = [before.messages[0], ask(each)]
            reply = line.chat(asked, max_tokens=context.max_tokens)
            if reply.finish_reason == "context_limit":
                return
            if line is not client:
                line.close()
            seconds = time.perf_counter() - started
            yield self._answered(conversation, each, reply, seconds, before.spots)

    def _past(self, conversation: Dialogue, before: DialogueHistory) -> Iterator[PastSession]:
        """Yield the sessions that are read, each behind the system message."""
        for session in conversation.sessions:
            spots = [
                before.spots[each.id] for each in session.utterances if each.id in before.spots
            ]
            if spots:
                said = [before.messages[0], *(before.messages[spot] for spot in spots)]
                yield PastSession(said, [None, *spots], session.when)
