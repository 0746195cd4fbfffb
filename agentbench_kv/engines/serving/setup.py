"""What serving engines have in common before they start."""

from __future__ import annotations

from pathlib import Path

from agentbench_kv.engines.base import Capability, EngineInfo
from agentbench_kv.engines.embedded.model import folder_sha
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.model import ModelFacts
from agentbench_kv.environments import home
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method


def refuse_method(method: Method) -> None:
    """Refuse a method whose cache a serving engine cannot hold."""
    if method.per_query_head:
        raise UsageError(
            f"{method.label} keeps a set per query head, a serving engine's cache has rows per KV "
            "head; use another preset or --engine embedded"
        )


def engine_info(
    name: str,
    options: EngineOptions,
    path: Path,
    facts: ModelFacts,
    *,
    gpu: bool,
    context_limit: int,
    capabilities: frozenset[Capability],
) -> EngineInfo:
    """Describe an engine over a Hugging Face model folder at `path`."""
    return EngineInfo(
        name=name,
        model=options.model,
        model_path=path,
        model_sha=folder_sha(path),
        device="cuda" if gpu else "cpu",
        dtype=options.dtype,
        context_limit=context_limit,
        eos_token_ids=facts.eos_token_ids,
        capabilities=capabilities,
    )


def log_file(name: str, folder: Path) -> Path:
    """Return where a backend's output goes; it stays when its scratch folder is removed."""
    logs = home() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{name}-{folder.name}.log"
