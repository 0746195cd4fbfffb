"""What sessions say: random ids laid out as an agent's history, the same for every server."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.serving_bench.jobs import Frames, TraceCall, TraceSession, Vocabulary

_THOUGHT, _CALL, _RESPONSE = 96, 32, 256  # tokens of a thought, a call and a tool's answer
_CHATML = "<|im_start|>"


def read_vocabulary(folder: Path) -> Vocabulary:
    """Return the ids of a model folder's tokenizer; it needs a `tokenizer.json`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise PrerequisiteError(f"no tokenizer.json in {folder}; name a model folder that has one")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise PrerequisiteError(f"cannot read {path}: {error}") from error
    special = sorted(tokenizer.get_added_tokens_decoder())
    return Vocabulary(tokenizer.get_vocab_size(with_added_tokens=True), special, _frames(tokenizer))


class Speaker:
    """Writes the prompts of sessions.

    `anew` draws recorded ids, too: others in the same number.

    With the frames of a chat format, the first prompt is a user's message and as many rounds of
    thought, call and tool answer as fit, and ends where the assistant starts to think; later turns
    end the thought with a call and bring the tool's answer. So a method that tells phases apart
    has every phase to work with. Without frames, or where they do not fit, all ids are random.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int, *, anew: bool = False) -> None:
        self._ids = np.setdiff1d(np.arange(vocabulary.size), vocabulary.special)
        self._frames = vocabulary.frames
        self._seed = seed
        self._anew = anew

    def prompts(self, number: int, session: TraceSession) -> list[list[int]]:
        """Return the new ids of every call of a session: lengths are exactly the session's.

        A fresh call's are a whole history in other words, and then what is new.
        """
        draw = np.random.default_rng([self._seed, number])
        first, *later = session.calls
        shared, own = self._shared(session), first.new_tokens - session.shared_tokens
        found = [self._given(first, draw) or [*shared, *self._first(draw, own)]]
        for call, prompt in zip(later, session.prompts[1:], strict=True):
            history = []
            if call.fresh:
                held = prompt - call.new_tokens - len(shared)
                history = [*shared, *self._first(draw, held)]
            new = self._given(call, draw) or self._later(draw, call.new_tokens)
            found.append([*history, *new])
        return found

    def _given(self, call: TraceCall, draw: np.random.Generator) -> list[int]:
        """Return a call's recorded ids; none if it has none."""
        return self._random(draw, len(call.ids)) if self._anew and call.ids else call.ids

    def _shared(self, session: TraceSession) -> list[int]:
        """Return the shared pieces, which have the same ids in every session."""
        found: list[int] = []
        for name, tokens in session.shared:
            digest = hashlib.sha256(name.encode()).digest()
            draw = np.random.default_rng([self._seed, int.from_bytes(digest[:8], "big")])
            found += self._random(draw, tokens)
        return found

    def _first(self, draw: np.random.Generator, size: int) -> list[int]:
        frames = self._frames
        if frames is None:
            return self._random(draw, size)
        ends = len(frames.user) + len(frames.end_user) + len(frames.assistant)
        step = len(frames.assistant) + _THOUGHT + frames.around_call + _CALL + _RESPONSE
        rounds, asked = divmod(size - ends, step)
        if rounds < 0:
            return self._random(draw, size)
        ids = [*frames.user, *self._random(draw, asked), *frames.end_user]
        for _ in range(rounds):
            ids += [*frames.assistant, *self._random(draw, _THOUGHT)]
            ids += self._answered(draw, frames, _CALL, _RESPONSE)
        return [*ids, *frames.assistant]

    def _later(self, draw: np.random.Generator, size: int) -> list[int]:
        frames = self._frames
        room = size - frames.around_call - len(frames.assistant) if frames else -1
        if frames is None or room < 0:
            return self._random(draw, size)
        call = min(_CALL, room // 2)
        return [*self._answered(draw, frames, call, room - call), *frames.assistant]

    def _answered(
        self, draw: np.random.Generator, frames: Frames, call: int, response: int
    ) -> list[int]:
        """Return a call and the tool's answer, from the end of the thought on."""
        head = [*frames.call, *self._random(draw, call)]
        return [*head, *frames.tool, *self._random(draw, response), *frames.end_tool]

    def _random(self, draw: np.random.Generator, size: int) -> list[int]:
        ids: list[int] = draw.choice(self._ids, size).tolist()
        return ids


def _frames(tokenizer: Tokenizer) -> Frames | None:
    """Return the markers of the ChatML family (Qwen, the micro model); None of any other."""
    if tokenizer.token_to_id(_CHATML) is None:
        return None

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return Frames(
        user=ids("<|im_start|>user\n"),
        end_user=ids("<|im_end|>\n"),
        assistant=ids("<|im_start|>assistant\n<think>\n"),
        call=ids("\n</think>\n\n<tool_call>\n"),
        tool=ids("\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n"),
        end_tool=ids("\n</tool_response><|im_end|>\n"),
    )
