"""Starting a server that loads our plug-in; what vLLM and SGLang have in common there."""

from __future__ import annotations

from typing import TypeVar

from agentbench_kv.engines.base import EngineInfo
from agentbench_kv.engines.embedded.model import folder_sha, model_path
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.engine import ServingEngine, refuse_method, scratch_folder
from agentbench_kv.engines.serving.model import read_model
from agentbench_kv.engines.serving.wire import PluginWire, ServerSetup
from agentbench_kv.environments import home, python_of

_Engine = TypeVar("_Engine", bound=ServingEngine)


def start_server(
    engine: type[_Engine],
    wire_class: type[PluginWire],
    name: str,
    options: EngineOptions,
    environment: str,
    *,
    gpu: bool,
) -> _Engine:
    """Return an engine over a new server; one for `full` runs as shipped."""
    refuse_method(options.method)
    path = model_path(options.model)
    facts = read_model(path)
    python, folder = python_of(environment), scratch_folder()
    stock = options.method.name == "full"
    wire = wire_class(ServerSetup(options, facts, python, path, folder, gpu, stock))
    info = EngineInfo(
        name=name,
        model=options.model,
        model_path=path,
        model_sha=folder_sha(path),
        device="cuda" if gpu else "cpu",
        dtype=options.dtype,
        context_limit=wire.context_limit,
        eos_token_ids=facts.eos_token_ids,
        capabilities=engine.capabilities,
    )
    # The log stays when the scratch folder is removed.
    logs = home() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}-{folder.name}.log"
    return engine(info, wire, folder, log, facts.bytes_per_token(options.dtype))
