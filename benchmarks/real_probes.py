"""Ask a probe task's questions of many methods at once, and of the full cache with both floors.

    python benchmarks/real_probes.py FILE.jsonl --model FOLDER --tool-syntax json --budget 512 \
        --method agentkv --method snapkv --set trigger=prefill+every --questions 4 --out FILE

FILE.jsonl holds sessions as `real_sessions.py` writes them. The questions, the forks they are
asked in, and what counts as right are those of `kvbench run --task probe/file --set file=FILE`,
whose runs read a session once for every method. Here it is read once for all: the full cache plays
it, and every method starts from its rows with its first event, as in `kvbench fidelity`.

One line of JSON for each session and arm; what is there already is not asked again. `removed`
leaves out questions about the first prompt, which would have to be read again for each.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from real_options import asking_options, chosen_arms, sessions_done

from agentbench_kv.adapters.probe.asking import without
from agentbench_kv.adapters.probe.questions import Probe, make_probes
from agentbench_kv.adapters.probe.session import ChatSession, read_sessions
from agentbench_kv.adapters.probe.values import contains, is_exact
from agentbench_kv.engines.embedded.attention import pack
from agentbench_kv.engines.embedded.forced import ForcedPlay, Labelled
from agentbench_kv.engines.embedded.forward import PREFILL_CHUNK, run_network, session_pools
from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.full import Full
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.run.fidelity import FidelityArm
from agentbench_kv.run.recordings import RecordedTurn, Recording, record_file


@dataclass(frozen=True)
class Asked:
    """A session with its questions: what is fed before each answer."""

    session: ChatSession
    probes: list[Probe]
    turns: tuple[RecordedTurn, ...]
    prompts: list[Labelled]  # behind the session
    alone: list[Labelled]  # without it
    removed: dict[int, Recording]  # by question: the session without its evidence, and the question


class Others:
    """Labels answers: none of them reaches another event."""

    def label(self, token: int) -> Phase:  # noqa: ARG002
        return Phase.OTHERS


def recorded(sessions: Sequence[ChatSession], model: str, syntax: str) -> list[Recording]:
    """Return sessions in a model's tokens."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        for number, session in enumerate(sessions):
            file.write(json.dumps(asdict(replace(session, id=str(number)))) + "\n")
        file.flush()
        return record_file(Path(file.name), model, None, syntax)


def prepared(session: ChatSession, model: str, syntax: str, questions: int, seed: str) -> Asked:
    """Make a session's questions and all that is fed."""
    probes = make_probes(session, questions, seed)

    def asking(history: ChatSession, probe: Probe) -> ChatSession:
        more = {"role": "user", "content": probe.question}, {"role": "assistant", "content": "x"}
        return replace(history, messages=(*history.messages, *more))

    empty = ChatSession(session.id, ())
    variants = [asking(session, probe) for probe in probes]
    variants += [asking(empty, probe) for probe in probes]
    variants += [asking(without(session, probe.message), probe) for probe in probes]
    found, n = recorded(variants, model, syntax), len(probes)
    asked, alone, removed = found[:n], found[n : 2 * n], found[2 * n :]
    turns = asked[0].turns[:-1] if asked else ()
    return Asked(
        session, probes, turns,
        [each.turns[-1].prompt for each in asked],
        [each.turns[-1].prompt for each in alone],
        {at: each for at, each in enumerate(removed) if first_change(each.turns, turns) > 0},
    )  # fmt: skip


def first_change(turns: Sequence[RecordedTurn], others: Sequence[RecordedTurn]) -> int:
    """Return the first turn that is another one; as many as there are if none is."""
    pairs = enumerate(zip(turns, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(others))


class Reader:
    """Feeds sessions of one model and draws greedily."""

    def __init__(self, model: LoadedModel, tokens: int, at_once: int = 64) -> None:
        # A fork has its own copy of the rows as soon as it adds to them: so many at a time.
        self._model, self._tokens, self._at_once = model, tokens, at_once
        self.codec = TokenCodec(load_tokenizer(model.path))
        self._end = int(self.codec.tokenizer.eos_token_id)

    @torch.inference_mode()
    def answers(self, source: EmbeddedSession, prompts: Sequence[Labelled]) -> list[str]:
        """Ask every question in a fork of a session."""
        found: list[str] = []
        for first in range(0, len(prompts), self._at_once):
            some = prompts[first : first + self._at_once]
            sides = [source.fork(f"q{at}", Others()) for at in range(len(some))]
            try:
                found += self.drawn(sides, some)
            finally:
                for side in sides:
                    side.free()
        return found

    @torch.inference_mode()
    def answers_behind(
        self, source: EmbeddedSession, rest: Labelled, prompts: Sequence[Labelled]
    ) -> list[str]:
        """Ask in forks of a fork that is fed some more first."""
        side = source.fork("behind", Others())
        try:
            if rest:
                self._prefill(side, rest)
            return self.answers(side, prompts)
        finally:
            side.free()

    @torch.inference_mode()
    def drawn(self, sides: Sequence[EmbeddedSession], prompts: Sequence[Labelled]) -> list[str]:
        """Feed each session its prompt; return what it answers."""
        found: list[list[int]] = [[] for _ in sides]
        for side, prompt, answer in zip(sides, prompts, found, strict=True):
            self._accept(side, answer, self._prefill(side, prompt))
        for _ in range(self._tokens - 1):
            going = [at for at, answer in enumerate(found) if answer[-1] != self._end]
            if not going:
                break
            for at, token in zip(going, self._decode([sides[at] for at in going]), strict=True):
                self._accept(sides[at], found[at], token)
        return [self.codec.decode([t for t in ids if t != self._end]) for ids in found]

    def _prefill(self, side: EmbeddedSession, prompt: Labelled) -> int:
        side.extend([token for token, _ in prompt], [phase for _, phase in prompt])
        side.begin_turn()
        best = -1
        while side.pending:
            side.take(PREFILL_CHUNK)
            (best,) = self._forward([side])
        return best

    def _decode(self, sides: Sequence[EmbeddedSession]) -> list[int]:
        for side in sides:
            side.take(1)
        return self._forward(sides)

    def _forward(self, sides: Sequence[EmbeddedSession]) -> list[int]:
        """Feed what sessions of one kind have taken; return each one's best next token."""
        packed = pack(sides, sides[0].query_buffer, self._model.attention.places)
        ends = torch.tensor(packed.rows).cumsum(0) - 1
        best = run_network(self._model, packed, ends.tolist()).argmax(-1).tolist()
        for side, rows in zip(packed.sessions, packed.rows, strict=True):
            side.fed_rows(rows)
        by_name = dict(zip((side.name for side in packed.sessions), best, strict=True))
        return [by_name[side.name] for side in sides]

    @staticmethod
    def _accept(side: EmbeddedSession, answer: list[int], token: int) -> None:
        answer.append(token)
        eviction = side.accept(token)
        if eviction is not None:
            side.compress(eviction)


def without_evidence(
    reader: Reader, source: EmbeddedSession, asked: Asked, turn: int
) -> dict[int, str]:
    """Ask about the messages that this turn would be the first to show, with them removed."""
    by_message: dict[int, list[int]] = {}
    for at, changed in asked.removed.items():
        if first_change(changed.turns, asked.turns) == turn:
            by_message.setdefault(asked.probes[at].message, []).append(at)
    found: dict[int, str] = {}
    for questions in by_message.values():
        behind = asked.removed[questions[0]].turns[turn:-1]
        rest = [pair for each in behind for pair in (*each.prompt, *each.answer)]
        prompts = [asked.removed[at].turns[-1].prompt for at in questions]
        found |= dict(zip(questions, reader.answers_behind(source, rest, prompts), strict=True))
    return found


def played(
    reader: Reader, model: LoadedModel, asked: Asked, arms: Sequence[FidelityArm], path: str
) -> Iterator[dict[str, Any]]:
    """Play a session once and yield the record of every arm and floor."""
    methods = [arm.spec(path, "probe", "bfloat16", "auto").built_method for arm in arms]
    play = ForcedPlay(model, methods)
    removed: dict[int, str] = {}
    try:
        for number, turn in enumerate(asked.turns):
            removed |= without_evidence(reader, play.sessions()[0], asked, number)
            for _ in play.turn(turn.prompt, turn.answer):
                pass
        first, *others = play.sessions()
        yield record(asked, "full", None, {}, dict(enumerate(reader.answers(first, asked.prompts))))
        for arm, session in zip(arms, others, strict=True):
            told = dict(enumerate(reader.answers(session, asked.prompts)))
            account = session.ledger.snapshot()
            kept = {"events": len(account.events), "live": account.live}
            budget = None if arm.budget is None else str(arm.budget)
            yield record(asked, arm.method, budget, dict(arm.settings), told, **kept)
    finally:
        play.close()
    yield record(asked, "full:removed", None, {}, removed)
    pools = session_pools(model, Full())
    names = [f"q{at}" for at in range(len(asked.alone))]
    blank = [EmbeddedSession(name, Others(), Full(), pools, None) for name in names]
    yield record(asked, "full:none", None, {}, dict(enumerate(reader.drawn(blank, asked.alone))))
    for side in blank:
        side.free()


def record(
    asked: Asked,
    method: str,
    budget: str | None,
    settings: dict[str, str],
    answers: dict[int, str],
    **more: int,
) -> dict[str, Any]:
    """Return what an arm's answers to a session's questions come to."""
    rows = []
    for at, answer in sorted(answers.items()):
        probe = asked.probes[at]
        right = int(contains(answer, probe.value)), int(is_exact(answer, probe.value))
        rows.append([at, probe.phase, *right, answer])
    return {
        "session": asked.session.id, "method": method, "settings": settings, "budget": budget,
        **more, "asked": rows,
    }  # fmt: skip


def main() -> None:
    """Ask what is missing."""
    parser = asking_options(__doc__, questions=4)
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no session after so many")
    given = parser.parse_args()
    arms = chosen_arms(given)
    model = load_model(given.model, "bfloat16", "auto")
    until = time.monotonic() + 60 * given.minutes
    reader = Reader(model, given.answer_tokens)
    done = sessions_done(given.out)
    for session in list(read_sessions(given.file))[: given.limit]:
        if session.id in done or time.monotonic() > until:
            continue
        asked = prepared(session, given.model, given.tool_syntax, given.questions, "probe/file/0")
        if not asked.probes:
            continue
        started = time.monotonic()
        records = list(played(reader, model, asked, arms, given.model))
        with given.out.open("a") as out:
            out.writelines(json.dumps(each) + "\n" for each in records)
        print(session.id, len(asked.probes), round(time.monotonic() - started), flush=True)


if __name__ == "__main__":
    main()
