"""Methods with a memory run on tasks that have past sessions to tell."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from agentbench_kv import __version__
from agentbench_kv.encoders.loading import encoder_sha, load_encoder
from agentbench_kv.engines.base import Capability
from agentbench_kv.environments import python_of
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.checkpoints import Checkpoints
from agentbench_kv.gateway.http import Embedder, ServerSettings
from agentbench_kv.gateway.recall import PlainMemories
from agentbench_kv.memories.store import TELLING, PackageStore
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.memory.plain import PlainMemory
from agentbench_kv.registry import load_task, names
from agentbench_kv.results.files import sweep, writing
from agentbench_kv.results.store import RunDir
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.run.trial import checkpoint_name

_STALE_S = 86400.0  # of other machines' processes, nobody knows whether they are alive


def check_memory(spec: RunSpec) -> None:
    """Refuse a method with a memory on a task without a past: UsageError.

    PrerequisiteError if its package, or the encoder that it searches by, is not there.
    """
    method = spec.built_method
    if not method.remembers:
        return
    if not load_task(spec.task).remembers:
        known = ", ".join(name for name in names("task") if load_task(name).remembers)
        raise UsageError(
            f"method {spec.method!r} brings back past sessions, and task {spec.task!r} has none; "
            f"use {known}"
        )
    if isinstance(method, PlainMemory):
        python_of(method.environment)
        load_encoder(method.encoder)


def check_banks(specs: Sequence[RunSpec], banks: Path) -> None:
    """Refuse a folder for banks where no method keeps any: UsageError."""
    if not any(_keeps_banks(spec.built_method) for spec in specs):
        raise UsageError(
            f"--banks {banks}: no method of this run reads a past into banks; use --method memart"
        )


def _keeps_banks(method: Method) -> bool:
    return Capability.MEMORY_BLOCKS.value in method.needs


def open_banks(banks: Path, method: Method) -> None:
    """Make a folder for a method's banks; remove what killed processes left half-written there."""
    if _keeps_banks(method):
        with writing(banks):
            banks.mkdir(parents=True, exist_ok=True)
        sweep(banks, _STALE_S)


def refuse_memory(method: Method) -> None:
    """Refuse a method with a memory where nobody tells it what is past: UsageError."""
    if method.remembers:
        raise UsageError(
            f"method {method.label!r} brings back past sessions, and no client can say which; use "
            "it in kvbench run"
        )


def server_settings(method: Method) -> ServerSettings:
    """Return what a run's own server needs: an encoder, if the method's memory asks for one."""
    if not isinstance(method, PlainMemory):
        return ServerSettings()
    encoder = load_encoder(method.encoder)
    return ServerSettings(embedder=Embedder(method.encoder, encoder.encode))


def attach_memory(
    stack: ExitStack,
    gateway: AnyGateway,
    method: PlainMemory,
    endpoint: str,
    run: RunDir | None = None,
) -> None:
    """Give a gateway a package's memory, which asks the gateway's own model at an endpoint.

    What it holds of a trial that is interrupted is kept in the run.
    """
    size = len(load_encoder(method.encoder).encode(["size"])[0])
    store = PackageStore(method, endpoint, gateway.engine.info.model, size)
    kept = None
    if run is not None:
        kept = Checkpoints(run, checkpoint_name, _conditions(gateway, method))
    gateway.memories = PlainMemories(gateway, stack.enter_context(store), kept)


def _conditions(gateway: AnyGateway, method: PlainMemory) -> dict[str, str]:
    """Return what a memory depends on that the run's spec does not say."""
    info = gateway.engine.info
    return {
        "kvbench": __version__,
        "model_sha": info.model_sha,
        "dtype": info.dtype,
        "chat_template_sha": str(gateway.provenance()["chat_template_sha"]),
        "encoder_sha": encoder_sha(method.encoder),
        "telling": TELLING,
    }
