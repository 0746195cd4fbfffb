"""What a whole cache costs on llama.cpp by its settings: cells of all together or of each slot.

    PYTHONPATH=. ENVIRONMENT/bin/python benchmarks/llamacpp_settings.py MODEL.gguf [--prompt 4096]

Our engine keeps all sessions in one unified cache, as an event needs it, with flash attention for
rows in float16 and without for those in float32. `llama-server` has one cache, too, unless `-np`
says how many slots there are: then each has cells of its own. This plays the same sessions under
both, with flash attention and without: prompts one after another, a tool result each, then decodes
of all together, without our watch. ENVIRONMENT is the folder of `llamacpp` that `kvbench env list`
names.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentbench_kv.engines.llamacpp.server.library import llama

CHUNK = 512  # tokens of a decode of a prompt
DECODES = 32
Place = tuple[int, int, int]  # a token, its position, its session


@dataclass(frozen=True)
class Settings:
    """What a context is asked for."""

    unified: bool
    flash: bool

    def __str__(self) -> str:
        cells = "one cache" if self.unified else "own cells"
        return f"{cells}, {'flash' if self.flash else 'plain'} attention"


class Player:
    """A context that sessions are fed into."""

    def __init__(self, handle: Any, seed: int) -> None:
        self._handle, self._llama = handle, llama()
        self._batch = self._llama.llama_batch_init(CHUNK, 0, 1)
        self._draw = random.Random(seed)

    def read(self, session: int, first: int, count: int) -> float:
        """Feed a session so many tokens from position `first` on; return the seconds."""
        places = [(self._draw.randrange(1000, 9000), first + i, session) for i in range(count)]
        return sum(self._decode(places[at : at + CHUNK]) for at in range(0, count, CHUNK))

    def step(self, sessions: int, position: int) -> float:
        """Feed every session a token; return the seconds."""
        draw = self._draw.randrange
        return self._decode([(draw(1000, 9000), position, each) for each in range(sessions)])

    def _decode(self, places: Sequence[Place]) -> float:
        raw = self._batch
        raw.n_tokens = len(places)
        for i, (token, position, session) in enumerate(places):
            raw.token[i], raw.pos[i] = token, position
            raw.n_seq_id[i], raw.seq_id[i][0] = 1, session
            raw.logits[i] = i + 1 == len(places)
        began = time.perf_counter()
        if code := self._llama.llama_decode(self._handle, raw):
            raise SystemExit(f"llama.cpp refused a batch (code {code})")
        self._llama.llama_synchronize(self._handle)
        return time.perf_counter() - began

    def free(self) -> None:
        self._llama.llama_batch_free(self._batch)


@contextmanager
def player(model: Any, settings: Settings, options: argparse.Namespace) -> Iterator[Player]:
    """Yield a new context with room for all sessions."""
    llama_cpp = llama()
    longest = options.prompt + options.result + DECODES
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx = options.sessions * -(-longest // 256) * 256
    wanted.n_seq_max = options.sessions
    wanted.n_batch = wanted.n_ubatch = CHUNK
    wanted.n_threads = wanted.n_threads_batch = options.threads
    wanted.flash_attn_type = int(settings.flash)
    wanted.kv_unified = settings.unified
    handle = llama_cpp.llama_init_from_model(model, wanted)
    if not handle:
        raise SystemExit("llama.cpp cannot make the context")
    made = Player(handle, options.seed)
    try:
        yield made
    finally:
        made.free()
        llama_cpp.llama_free(handle)


def measure(made: Player, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return seconds of a first prompt, of a result, and of a decode of all sessions: medians."""
    sessions = range(options.sessions)
    prompts = [made.read(each, 0, options.prompt) for each in sessions]
    results = [made.read(each, options.prompt, options.result) for each in sessions]
    first = options.prompt + options.result
    steps = [made.step(options.sessions, first + i) for i in range(DECODES)]
    return statistics.median(prompts), statistics.median(results), statistics.median(steps)


def main() -> None:
    """Read the options, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--result", type=int, default=512)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    llama_cpp = llama()
    model = llama_cpp.llama_model_load_from_file(
        options.model.encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp cannot load {options.model}")
    arms = [Settings(*each) for each in itertools.product((True, False), repeat=2)]
    found: dict[Settings, list[tuple[float, float, float]]] = {arm: [] for arm in arms}
    for repeat in range(options.repeats):
        first = repeat % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            with player(model, arm, options) as made:
                found[arm].append(measure(made, options))
    print("| settings | a prompt, s | a result, s | a decode of all, ms |\n|---|--:|--:|--:|")
    for arm, runs in found.items():
        prompt, result, step = (statistics.median(each) for each in zip(*runs, strict=True))
        print(f"| {arm} | {prompt:.1f} | {result:.2f} | {step * 1e3:.0f} |")


if __name__ == "__main__":
    main()
