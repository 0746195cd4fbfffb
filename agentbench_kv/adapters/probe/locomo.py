"""LoCoMo's questions, each asked behind the same conversation, which is read once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentbench_kv.adapters.base import Reading, TrialContext
from agentbench_kv.adapters.locomo.data import Dialogue, Question
from agentbench_kv.adapters.locomo.figures import Answered
from agentbench_kv.adapters.locomo.task import LocomoQA, ask
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

    def _reading(self) -> Reading | None:
        return None  # questions are asked in sessions beside this one

    def _play(
        self, conversation: Dialogue, questions: Sequence[Question], context: TrialContext
    ) -> Iterator[Answered]:
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
