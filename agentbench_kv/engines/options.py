"""What every engine is created from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentbench_kv.methods.base import Method

ScriptSource = Callable[[str], Sequence[str]]  # session id -> assistant texts


@dataclass(frozen=True)
class EngineOptions:
    """Options of `Engine.create`; an engine ignores what it has no use for."""

    model: str  # a shipped model's name (`micro`), a folder, or what the engine understands
    method: Method  # budget included
    device: str = "auto"  # or `cpu`, `cuda`, `cuda:N`
    dtype: str = "float32"  # or `bfloat16`, `float16`
    concurrency: int = 16  # sessions the caller will drive at once
    max_live_tokens: int | None = None  # over all sessions; None takes half of the free memory
    scripts: ScriptSource | None = None  # for the scripted engine
    trace: Path | None = None  # folder for what every event kept, for conformance checks
    load_format: str = "auto"  # or `dummy`: random weights of the model's shape, throughput only
    # Options passed on to a serving engine's own command line, by their names without dashes.
    engine_args: Mapping[str, str] = field(default_factory=dict)
    # Go on with a version of a serving engine that the adapter was not written for.
    allow_untested: bool = False
