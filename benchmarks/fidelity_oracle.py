"""`kvbench fidelity`'s figures of a real model, computed again by plain transformers.

    python benchmarks/fidelity_oracle.py SESSIONS.jsonl --model FOLDER --tool-syntax json \
        --budget 384 --method agentkv --method snapkv --set trigger=prefill+every --limit 10

A run in the place of the file gives its own sessions.

Hugging Face's model reads every session in one pass, in float32, with eager attention that does not
see what a method had evicted when a token was read (`conformance/reference.py`). KL, top-1 and dnll
are computed from its logits in float64, by the definitions. Only the kept sets are the method's
own. Prints the largest difference of each figure of any token, and that of its mean over the
session, which is what is reported.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_options import chosen_arms, sessions_done, shared_options
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentbench_kv.analysis.fidelity import compare
from agentbench_kv.analysis.traces import CacheEvent
from agentbench_kv.conformance.driver import SessionTrace
from agentbench_kv.conformance.reference import reference_logits, visible
from agentbench_kv.engines.embedded.forced import ForcedPlay
from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.methods.base import Method
from agentbench_kv.run.recordings import Recording, record_file, record_run

FIGURES = ("kl", "dnll", "top1")
Figures = Mapping[str, np.ndarray]


@dataclass
class Events(Observer):
    """What a method's events left, as original positions."""

    found: list[CacheEvent] = field(default_factory=list)

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:  # noqa: ARG002
        self.found.append(CacheEvent(logical, kept_positions.cpu().clone()))


def by_kvbench(
    model: LoadedModel, recording: Recording, methods: Sequence[Method]
) -> tuple[list[Figures], list[list[CacheEvent]]]:
    """Play a session; return every method's figures of all answered tokens, and its events."""
    seen = [Events() for _ in methods]
    play = ForcedPlay(model, methods, recorders=seen)
    rows: list[dict[str, list[float]]] = [{name: [] for name in FIGURES} for _ in methods]
    try:
        for turn in recording.turns:
            for stretch in play.turn(turn.prompt, turn.answer):
                span = slice(stretch.first, stretch.first + len(stretch.full))
                tokens = torch.tensor([token for token, _ in turn.answer[span]])
                for own, logits in zip(rows, stretch.of_methods, strict=True):
                    told = compare(stretch.full, logits, tokens)
                    for name in FIGURES:
                        own[name] += getattr(told, name).tolist()
    finally:
        play.close()
    return [{k: np.array(v) for k, v in own.items()} for own in rows], [e.found for e in seen]


def by_transformers(
    model: Any, recording: Recording, events: Sequence[Sequence[CacheEvent]]
) -> Iterator[Figures]:
    """Yield the same from one masked pass for every method and one without a mask."""
    tokens, answered = flat(recording)
    config = model.config
    size = config.num_hidden_layers, config.num_key_value_heads
    chosen = torch.tensor(tokens)[answered]
    full = logprobs(model, tokens, answered, [], size)
    for own in events:
        other = logprobs(model, tokens, answered, own, size)
        picked = chosen[:, None]
        yield {
            "kl": (full.exp() * (full - other)).sum(-1).numpy(),
            "dnll": (full.gather(1, picked) - other.gather(1, picked))[:, 0].numpy(),
            "top1": (full.argmax(-1) == other.argmax(-1)).numpy(),
        }


def flat(recording: Recording) -> tuple[list[int], list[int]]:
    """Return a session's tokens, and where those of its answers are."""
    tokens: list[int] = []
    answered: list[int] = []
    for turn in recording.turns:
        tokens += [token for token, _ in turn.prompt]
        answered += range(len(tokens), len(tokens) + len(turn.answer))
        tokens += [token for token, _ in turn.answer]
    return tokens, answered


def logprobs(
    model: Any,
    tokens: Sequence[int],
    answered: Sequence[int],
    events: Sequence[CacheEvent],
    size: tuple[int, int],
) -> Tensor:
    """Return log p [answered, vocab] of every answered token's place, float64."""
    trace = SessionTrace(tokens=list(tokens), events=list(events))
    logits = reference_logits(model, tokens[:-1], visible(trace, *size))
    return logits[[at - 1 for at in answered]].double().log_softmax(-1)


def recorded(given: argparse.Namespace) -> list[Recording]:
    if given.file.is_dir():
        return record_run(given.file).recordings
    return record_file(given.file, given.model, None, given.tool_syntax)


def main() -> None:
    """Compare both, session by session."""
    parser = shared_options(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--most", type=int, default=3000, help="tokens of a session; more: left")
    given = parser.parse_args()
    arms = chosen_arms(given)
    specs = [arm.spec(given.model, "oracle", "float32", "cpu") for arm in arms]
    methods = [spec.built_method for spec in specs]
    loaded = load_model(given.model, "float32", "cpu")
    plain = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=torch.float32)
    done = sessions_done(given.out)
    for recording in recorded(given):
        if len(done) >= given.limit:
            break
        if recording.sample in done or len(flat(recording)[0]) > given.most:
            continue
        done.add(recording.sample)
        started = time.monotonic()
        told, events = by_kvbench(loaded, recording, methods)
        rows = zip(methods, told, by_transformers(plain, recording, events), events, strict=True)
        for method, own, reference, seen in rows:
            row = {"session": recording.sample, "method": method.label, "events": len(seen)}
            row |= {"tokens": len(own["kl"]), "mean_kl": float(reference["kl"].mean())}
            row |= {
                name: float(np.abs(own[name].astype(float) - reference[name]).max())
                for name in FIGURES
            }
            row |= {
                f"mean_{name}_off": float(abs(own[name].mean() - reference[name].mean()))
                for name in FIGURES
            }
            row["seconds"] = round(time.monotonic() - started)
            print(json.dumps(row), flush=True)
            with given.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
