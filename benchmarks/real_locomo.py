"""Ask LoCoMo's questions of many methods at once, beside the full cache and beside nothing read.

    python benchmarks/real_locomo.py --model FOLDER --budget 2048 --method agentkv --method snapkv \
        --set trigger=prefill+every --questions 30 --out FILE.jsonl

A conversation, its questions, the forks they are asked in and F1 are those of
`kvbench run --task probe/locomo`, which reads a conversation once for every method. Here it is read
once for all: every method starts from the full cache's rows with its first event. Questions are
spread evenly over those of the four categories that have an answer.

One line of JSON for each conversation and arm; what is there already is not asked again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from real_options import asking_options, chosen_arms, sessions_done
from real_probes import Others, Reader, recorded

from agentbench_kv.adapters.locomo.data import Dialogue, Question, load
from agentbench_kv.adapters.locomo.figures import marks
from agentbench_kv.adapters.locomo.task import ask, history
from agentbench_kv.adapters.probe.locomo import READ
from agentbench_kv.adapters.probe.session import ChatSession
from agentbench_kv.engines.embedded.forced import ForcedPlay, Labelled
from agentbench_kv.engines.embedded.forward import session_pools
from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.methods.full import Full
from agentbench_kv.run.fidelity import FidelityArm
from agentbench_kv.run.recordings import RecordedTurn, Recording

AT_ONCE = 4  # questions: 32,768 rows of a 0.5B model are 0.4 GB, and every fork copies them
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)  # no part of what is marked


@dataclass(frozen=True)
class Asked:
    """A conversation with its questions: what is fed before each answer."""

    name: str
    questions: list[Question]
    turn: RecordedTurn  # the conversation, and that it has been read
    prompts: list[Labelled]  # behind it
    alone: list[Labelled]  # without it


def spread(dialogue: Dialogue, count: int) -> list[Question]:
    """Return so many of a conversation's questions, evenly spread; all if it has fewer."""
    places = np.linspace(0, len(dialogue.questions) - 1, min(count, len(dialogue.questions)))
    return [dialogue.questions[round(place)] for place in places]


def prepared(dialogue: Dialogue, model: str, syntax: str, count: int) -> Asked:
    system, *said = history(dialogue).messages
    read = {"role": "assistant", "content": READ}  # the task says it where nothing was read, too
    questions = spread(dialogue, count)
    last = {"role": "assistant", "content": "x"}
    sessions = [
        ChatSession(dialogue.id, (system, *before, read, ask(each), last))
        for before in (said, ())
        for each in questions
    ]
    found = recorded(sessions, model, syntax)
    behind, alone = found[: len(questions)], found[len(questions) :]
    return Asked(
        dialogue.id, questions, found[0].turns[0],
        [each.turns[-1].prompt for each in behind],
        [before_answer(each) for each in alone],
    )  # fmt: skip


def before_answer(recording: Recording) -> Labelled:
    """Return all that is fed before a session's last answer."""
    *earlier, last = recording.turns
    return [pair for turn in earlier for pair in (*turn.prompt, *turn.answer)] + [*last.prompt]


def played(
    reader: Reader, model: LoadedModel, asked: Asked, arms: Sequence[FidelityArm], path: str
) -> Iterator[dict[str, Any]]:
    """Read a conversation once; yield what every arm answers, then what nothing read does."""
    methods = [arm.spec(path, "probe", "bfloat16", "auto").built_method for arm in arms]
    play = ForcedPlay(model, methods)
    try:
        for _ in play.turn(asked.turn.prompt, asked.turn.answer):
            pass
        first, *others = play.sessions()
        yield record(asked, "full", None, {}, reader.answers(first, asked.prompts), first)
        for arm, session in zip(arms, others, strict=True):
            budget = None if arm.budget is None else str(arm.budget)
            told = reader.answers(session, asked.prompts)
            yield record(asked, arm.method, budget, dict(arm.settings), told, session)
    finally:
        play.close()
    pools = session_pools(model, Full())
    names = [f"q{at}" for at in range(len(asked.alone))]
    blank = [EmbeddedSession(name, Others(), Full(), pools, None) for name in names]
    yield record(asked, "full:none", None, {}, reader.drawn(blank, asked.alone), None)
    for side in blank:
        side.free()


def record(
    asked: Asked,
    method: str,
    budget: str | None,
    settings: dict[str, str],
    answers: Sequence[str],
    session: EmbeddedSession | None,
) -> dict[str, Any]:
    """Return what an arm's answers come to: F1, and whether it is at least one half."""
    rows = []
    for question, said in zip(asked.questions, answers, strict=True):
        answer = _THOUGHT.sub("", said).strip()
        f1 = marks(question, answer, {})["f1"] or 0.0
        rows.append([question.index, question.category, round(f1, 4), int(f1 >= 0.5), answer])
    account = None if session is None else session.ledger.snapshot()
    kept = {} if account is None else {"events": len(account.events), "live": account.live}
    return {
        "session": asked.name, "method": method, "settings": settings, "budget": budget,
        **kept, "asked": rows,
    }  # fmt: skip


def main() -> None:
    """Ask what is missing."""
    parser = asking_options(__doc__, questions=30)
    parser.add_argument("--limit", type=int, help="conversations")
    given = parser.parse_args()
    arms = chosen_arms(given)
    model = load_model(given.model, "bfloat16", "auto")
    reader = Reader(model, given.answer_tokens, AT_ONCE)
    done = sessions_done(given.out)
    for dialogue in list(load().conversations.values())[: given.limit]:
        if dialogue.id in done:
            continue
        asked = prepared(dialogue, given.model, given.tool_syntax, given.questions)
        started = time.monotonic()
        records = list(played(reader, model, asked, arms, given.model))
        with given.out.open("a") as out:
            out.writelines(json.dumps(each) + "\n" for each in records)
        print(dialogue.id, len(asked.questions), round(time.monotonic() - started), flush=True)


if __name__ == "__main__":
    main()
