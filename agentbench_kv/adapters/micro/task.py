"""The micro tasks: generated tool-use sessions, executed and checked exactly.

A session scores one if every message was right; its tallies say where facts got lost.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from agentbench_kv.adapters.agent_client import NULL_SENTENCE
from agentbench_kv.adapters.base import (
    AgentClient,
    Fact,
    LastUses,
    Message,
    Outcome,
    Reply,
    Sample,
    ScriptedAgent,
    Task,
    TrialContext,
)
from agentbench_kv.adapters.micro.episode import Environment, Episode, Slot, last_uses
from agentbench_kv.adapters.micro.generate import PROFILES, TEST_SEEDS, generate, held_out_seed
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import Metric, TrialStatus

Tally = tuple[int, int]  # how many were right, how many were asked for
EVIDENCE = ("recurring", "one_shot")  # the kinds of facts that have to be recalled
DEFAULT_SAMPLES = 50
SEED_STRIDE = 1_000_000
MAX_MESSAGE_TOKENS = 192
_NOT_EXECUTED = '{"error": "not executed"}'


@dataclass(frozen=True)
class SessionScore:
    """Result of one session."""

    success: bool  # every call and every reply was exactly as expected
    tallies: dict[str, Tally]  # of exact `messages`, and of recalled facts as in `RecallTask`
    facts: tuple[Fact, ...]  # the recalled facts, in the order they were needed

    @property
    def metrics(self) -> dict[str, Metric]:
        found: dict[str, Metric] = {}
        for name, (right, asked) in self.tallies.items():
            found |= {f"{name}_right": right, f"{name}_asked": asked}
        return found


def score(environment: Environment) -> SessionScore:
    exact = environment.exact
    recalled = [(j.slot, j.right) for j in environment.judged if j.slot.kind in EVIDENCE]
    kinds = _tallies(recalled, lambda slot: slot.kind)
    tallies = {
        "messages": (sum(exact), len(exact)),
        **_tallies(recalled, lambda slot: slot.source),
        **{kind: kinds[kind] for kind in EVIDENCE if kind in kinds},
        **_tallies(recalled, lambda slot: f"{slot.source}_{slot.kind}"),
    }
    facts = (Fact(slot.handle, slot.source, slot.kind, right) for slot, right in recalled)
    return SessionScore(environment.done and all(exact), tallies, tuple(facts))


def _tallies(answers: Iterable[tuple[Slot, bool]], name: Callable[[Slot], str]) -> dict[str, Tally]:
    asked, right = Counter[str](), Counter[str]()
    for slot, is_right in answers:
        asked[name(slot)] += 1
        right[name(slot)] += is_right
    return {key: (right[key], count) for key, count in sorted(asked.items())}


class RecallTask(Task):
    """Sessions of one profile; a session scores 1 if every call and reply was exactly right.

    Sub-scores are by the phase of the needed evidence (`think`, `act`, `tool`, `others`), by
    whether it is needed again and again (`recurring`) or once, long after (`one_shot`), and by both
    (`tool_one_shot`).
    """

    profile: ClassVar[str]

    def samples(self, limit: int | None, seed: int) -> list[Sample]:
        """Return held-out episodes; they are generated, so `limit` may be any number."""
        count = DEFAULT_SAMPLES if limit is None else limit
        first = seed * SEED_STRIDE
        if seed < 0 or count > SEED_STRIDE or first + count > TEST_SEEDS:
            raise UsageError(
                f"seed {seed} with {count} samples: expected a seed from 0 to "
                f"{TEST_SEEDS // SEED_STRIDE - 1} and at most {SEED_STRIDE} samples"
            )
        return [Sample(id=f"{self.profile}-{first + index}") for index in range(count)]

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        episode = self._episode(sample)
        environment = Environment(episode)
        messages: list[Message] = [{"role": "system", "content": episode.system}]
        limit = min(MAX_MESSAGE_TOKENS, context.max_tokens)
        if not play(context.client, environment, messages, limit):
            return Outcome(TrialStatus.CONTEXT_LIMIT, transcript=messages)
        result = score(environment)
        success, facts = float(result.success), result.facts
        return Outcome(TrialStatus.SCORED, success, result.metrics, messages, facts=facts)

    def last_uses(self, sample: Sample) -> LastUses:
        return last_uses(self._episode(sample))

    def nothing_right(self, sample: Sample) -> Mapping[str, Metric]:
        environment = Environment(self._episode(sample))
        while not environment.done:
            environment.abandon()
        return score(environment).metrics

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        return scripted(self._episode(sample), agent)

    def provenance(self) -> dict[str, Any]:
        """Return a hash of the first episodes: it changes when the grammar does."""
        digest = hashlib.sha256()
        for index in range(8):
            episode = generate(held_out_seed(index), PROFILES[self.profile])
            text = repr((episode.system, episode.tools, episode.turns))
            # Named as the classes were when the first runs were recorded.
            digest.update(text.replace("Expected", "").encode())
        return {"episodes_sha": digest.hexdigest()}

    def _episode(self, sample: Sample) -> Episode:
        index = int(sample.id.rpartition("-")[2])
        return generate(held_out_seed(index), PROFILES[self.profile])


class Recall1k(RecallTask):
    """Sessions of about 1,000 tokens."""

    name = "micro/recall-1k"
    summary = "generated tool-use sessions, about 1,000 tokens each"
    profile = "recall-1k"


class Recall5k(RecallTask):
    """Sessions of about 5,000 tokens; the default task."""

    name = "micro/recall-5k"
    summary = "generated tool-use sessions, about 5,000 tokens each"
    profile = "recall-5k"


def scripted(episode: Episode, agent: ScriptedAgent) -> list[str]:
    """Return the raw texts of an agent; the corrupt one gets the last call's first value wrong."""
    if agent == "null":
        return [NULL_SENTENCE] * len(episode.turns)
    texts: list[str] = []
    for turn in episode.turns:
        texts += [*(call.raw for call in turn.calls), turn.reply.raw]
    if agent == "corrupt":
        last = episode.calls[-1]
        name, value = next(iter(last.arguments.items()))
        wrong = replace(last, arguments={**last.arguments, name: value + "x"})
        texts[texts.index(last.raw)] = wrong.raw
    return texts


def play(
    client: AgentClient, environment: Environment, messages: list[Message], limit: int
) -> bool:
    """Hold the session; False if it ran into the model's context limit."""
    while not environment.done:
        messages.append({"role": "user", "content": environment.request})
        turn_over = False
        while not turn_over:
            reply = client.chat(messages, environment.episode.tools, max_tokens=limit)
            messages.append(reply.message)
            if reply.finish_reason == "context_limit":
                return False
            turn_over = _act(environment, reply, messages)
    return True


def _act(environment: Environment, reply: Reply, messages: list[Message]) -> bool:
    """Execute an assistant message; True if it ended the user turn."""
    over = reply.finish_reason == "length" or reply.unparsable
    if over:
        over = environment.abandon().turn_over
    elif not reply.tool_calls:
        return environment.reply(reply.content).turn_over
    for call in reply.tool_calls:
        text = _NOT_EXECUTED  # endpoints refuse a history with calls that nobody answered
        if not over:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            arguments = arguments if isinstance(arguments, dict) else {}
            observation = environment.call(function["name"], arguments)
            text, over = observation.text, observation.turn_over
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return over
