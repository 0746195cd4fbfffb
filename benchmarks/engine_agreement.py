r"""Greedy tokens of one engine against another's logits, along the same real agent sessions.

    python benchmarks/engine_agreement.py --engine llamacpp --model f32.gguf --against FOLDER \
        --task bfcl/web_search_base --set corpus=synthetic --tool-syntax json

Sessions of a task are played greedily on `--engine` with `--model`. Then the embedded engine's
network with the weights of `--against` reads each session in one pass, along those very tokens:
every generated token either is its choice too, or there is a gap, by how much it preferred
another. Printed per session: tokens, the share that is equal, where the first other choice is, its
gap and the largest gap. Sessions end at `--most` tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from agentbench_kv.adapters.base import Sample, Task
from agentbench_kv.engines.base import Engine, Generation, Sampling
from agentbench_kv.engines.embedded.model import load_model
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import load_task
from agentbench_kv.run.runner import trial_setup
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.run.trial import play_session


@dataclass
class Log:
    """A session's tokens, and which of them were generated."""

    tokens: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)  # positions


class Recorded:
    """Iterates over a generation and notes its tokens; everything else is the generation's own."""

    def __init__(self, below: Generation, log: Log) -> None:
        self._below, self._log = below, log

    def __iter__(self) -> Iterator[int]:
        for token in self._below:
            self._log.generated.append(len(self._log.tokens))
            self._log.tokens.append(token)
            yield token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def record(engine: Engine) -> dict[str, Log]:
    """Keep what every session of an engine is given, and generates."""
    logs: dict[str, Log] = {}
    extend, generate = engine.extend, engine.generate

    def extended(session: str, tokens: Any, phases: Any) -> None:
        extend(session, tokens, phases)
        logs.setdefault(session, Log()).tokens.extend(tokens)

    def generated(session: str, sampling: Sampling) -> Recorded:
        return Recorded(generate(session, sampling), logs[session])

    vars(engine).update(extend=extended, generate=generated)
    return logs


def chosen(task: Task, spec: RunSpec, names: list[str]) -> list[Sample]:
    """Return the samples that are named, or the first ones."""
    if not names:
        return list(task.samples(spec.limit, spec.seed))
    found = [sample for sample in task.samples(None, spec.seed) if sample.id in names]
    if missing := set(names) - {sample.id for sample in found}:
        raise UsageError(f"{spec.task} has no sample {', '.join(sorted(missing))}")
    return found


def played(spec: RunSpec, task: Task, samples: list[Sample]) -> dict[str, Log]:
    """Play samples one after the other; return their logs by sample."""
    logs = {}
    with trial_setup(spec, task, samples) as setup:
        kept = record(setup.engine)
        for sample in samples:
            kept.clear()
            attempt = play_session(setup, sample, trial=0)
            (logs[sample.id],) = kept.values()
            count = len(logs[sample.id].generated)
            say(
                f"{sample.id}: {len(logs[sample.id].tokens)} tokens, {count} generated, "
                f"{attempt.outcome.status.value}, score {attempt.outcome.score}"
            )
    return logs


def gaps(network: Any, log: Log) -> torch.Tensor:
    """Return by how much the network preferred another token to each generated one; 0 if not."""
    ids, places = torch.tensor([log.tokens]), torch.tensor(log.generated) - 1
    with torch.inference_mode():
        hidden = network.model(ids).last_hidden_state[0, places]
        logits = network.lm_head(hidden).float()
    chosen = logits.gather(1, ids[0, places + 1][:, None])[:, 0]
    return logits.max(1).values - chosen


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="llamacpp")
    parser.add_argument("--model", required=True)
    parser.add_argument("--against", required=True, help="model of the embedded engine")
    parser.add_argument("--task", default="micro/recall-1k")
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--sample", action="append", default=[], help="only this; repeatable")
    parser.add_argument("--set", action="append", default=[], help="the task's; repeatable")
    parser.add_argument("--tool-syntax", default="")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--most", type=int, default=8192)
    args = parser.parse_args()
    spec = RunSpec(
        *(args.engine, args.model, "full", None, args.task),
        limit=args.limit,
        concurrency=1,
        max_tokens=args.max_tokens,
        dtype=args.dtype,
        tool_syntax=args.tool_syntax,
        context_limit=args.most,
    )
    spec = resolve(spec, dict(pair.split("=", 1) for pair in args.set))
    task = load_task(spec.task).create(spec.task_params)
    try:
        logs = played(spec, task, chosen(task, spec, args.sample))
    finally:
        task.close()
    network = load_model(args.against, args.dtype, "cpu").network.eval()
    network.set_attn_implementation("sdpa")
    say(f"read by the embedded engine's network, {args.dtype}, in one pass:")
    total, equal = 0, 0
    for sample, log in logs.items():
        found = gaps(network, log)
        other = (found > 0).nonzero()[:, 0].tolist()
        total, equal = total + len(found), equal + len(found) - len(other)
        first = f"first at token {other[0]}, gap {float(found[other[0]]):.2e}" if other else "none"
        say(
            f"{sample}: {len(found)} tokens, {len(found) - len(other)} equal; other choices: "
            f"{first}; largest gap {float(found.max()):.2e}"
        )
    say(f"{equal} of {total} greedy tokens are equal ({equal / max(total, 1):.2%})")


if __name__ == "__main__":
    main()
