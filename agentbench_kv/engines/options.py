"""What every engine is created from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentbench_kv.methods.base import Method

ScriptSource = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class EngineOptions:
    """Options of `Engine.create`; an engine ignores what it has no use for.

    Attributes
    ----------
    model : str
        A shipped model's name (`micro`), a folder, or what the engine understands.
    method : Method
        The KV-cache method, budget included.
    device : str
        `auto`, `cpu`, `cuda` or `cuda:N`.
    dtype : str
        `float32`, `bfloat16` or `float16`.
    concurrency : int
        Sessions the caller will drive at once.
    max_live_tokens : int or None
        KV memory limit in cached tokens over all sessions; None takes half of the free memory.
    scripts : callable, optional
        Session id -> assistant texts, for the scripted engine.
    trace : Path, optional
        Folder to write what every event kept to, for conformance checks of serving engines.
    load_format : str
        `auto`, or `dummy` for random weights of the model's shape: throughput only.
    engine_args : mapping
        Options passed on to a serving engine's own command line, by their names without dashes.
    allow_untested : bool
        Go on with a version of a serving engine that the adapter was not written for.
    """

    model: str
    method: Method
    device: str = "auto"
    dtype: str = "float32"
    concurrency: int = 16
    max_live_tokens: int | None = None
    scripts: ScriptSource | None = None
    trace: Path | None = None
    load_format: str = "auto"
    engine_args: Mapping[str, str] = field(default_factory=dict)
    allow_untested: bool = False
