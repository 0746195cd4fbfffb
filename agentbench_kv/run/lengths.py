"""How long a task's first prompt is: what a budget has to hold before the agent says a word."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentbench_kv.adapters.base import Sample, ScriptedAgent, Task
from agentbench_kv.engines.embedded.model import tokenizer_path
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import KVBenchError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.phases.tokens import load_tokenizer
from agentbench_kv.registry import load_task
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.run.trial import TrialSetup, play_session, sample_key

BUDGETS = (1024, 2048, 3072, 4096, 8192)
_AGENT: ScriptedAgent = "null"
_WIDTH = 8


@dataclass(frozen=True)
class PromptLengths:
    """First prompts of a task, in tokens of one model: system prompt, tools, first request."""

    task: str
    tokenizer: str  # whose tokens they are
    vocabulary: int
    samples: int
    shortest: int
    median: float
    longest: int
    over: dict[int, float]  # budget in tokens -> share of samples with a longer first prompt


def prompt_lengths(
    tasks: Sequence[str],
    model: str,
    limit: int | None,
    settings: Mapping[str, str],
    budgets: Sequence[int] = BUDGETS,
    left_out: Callable[[str, str], None] = lambda _task, _why: None,
) -> list[PromptLengths]:
    """Measure the first prompts of tasks; one that cannot be played is named and left out.

    `model` is `micro`, a Hugging Face folder or a GGUF file: its tokenizer and template count.
    """
    path = tokenizer_path(model)
    entries = len(load_tokenizer(path))
    rows = []
    for name in tasks:
        try:
            lengths = first_prompts(name, path, limit, settings)
        except KVBenchError as error:
            left_out(name, str(error))
        else:
            rows.append(_summed_up(name, model, entries, lengths, budgets))
    return rows


def _summed_up(
    task: str, tokenizer: str, vocabulary: int, lengths: Sequence[int], budgets: Sequence[int]
) -> PromptLengths:
    return PromptLengths(
        task=task,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        samples=len(lengths),
        shortest=min(lengths),
        median=statistics.median(lengths),
        longest=max(lengths),
        over={size: sum(n > size for n in lengths) / len(lengths) for size in budgets},
    )


def first_prompts(
    name: str, tokenizer: Path, limit: int | None, settings: Mapping[str, str]
) -> list[int]:
    """Play one trial of each sample with the null agent; return its first prompt's tokens."""
    own = {key: value for key, value in settings.items() if key in load_task(name).parameters()}
    base = RunSpec(
        engine="scripted", model=_AGENT, method="full", budget=None, task=name, limit=limit
    )
    spec = resolve(base, own)
    with ExitStack() as stack:
        task = load_task(name).create(spec.task_params)
        stack.callback(task.close)
        samples = task.samples(limit, spec.seed)
        setup = _setup(stack, spec, task, samples, tokenizer)
        pool = stack.enter_context(ThreadPoolExecutor(_WIDTH))
        return list(pool.map(partial(_first_prompt, setup), samples))


def _setup(
    stack: ExitStack, spec: RunSpec, task: Task, samples: Sequence[Sample], tokenizer: Path
) -> TrialSetup:
    """Return what `runner.trial_setup` does, but over the tokenizer of any model."""
    by_key = {sample_key(sample.id): sample for sample in samples}

    def texts(session: str) -> list[str]:
        return task.script(by_key[session.rpartition("|")[2]], _AGENT)

    engine = ScriptedEngine(texts, tokenizer_path=tokenizer, model=_AGENT)
    stack.callback(engine.shutdown)
    gateway = Gateway(engine, tool_syntax="hermes")
    endpoint = None
    if task.needs_endpoint:
        endpoint = stack.enter_context(BackgroundServer(gateway, concurrency=_WIDTH)).url
    return TrialSetup(spec, task, engine, gateway, endpoint)


def _first_prompt(setup: TrialSetup, sample: Sample) -> int:
    attempt = play_session(setup, sample, trial=0)
    turns = attempt.report.turns
    if not turns:
        why = (attempt.outcome.error or "no request was sent").strip().splitlines()[-1]
        raise KVBenchError(f"sample {sample.id!r} came to no prompt: {why}")
    return turns[0].prompt_tokens
