"""What every engine is created from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """

    model: str
    method: Method
    device: str = "auto"
    dtype: str = "float32"
    concurrency: int = 16
    max_live_tokens: int | None = None
    scripts: ScriptSource | None = None
