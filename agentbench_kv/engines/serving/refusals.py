"""What an engine with a server refuses before it starts one: methods, options, models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.context import stretched_folder
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.serving.model_facts import TURNABLE, ModelFacts, read_model
from agentbench_kv.engines.serving.wire import asked_context
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.full import Full

# Options of vLLM and of SGLang that change what a model's config says.
_OVERRIDES = ("hf-overrides", "json-model-override-args")
_PARALLEL = {
    "dp": "data", "pp": "pipeline", "tp": "tensor",
    "dcp": "decode context", "pcp": "prefill context",
}  # fmt: skip
_KV_DTYPE = "kv-cache-dtype"
_WIDE = ("auto", "bf16", "bfloat16", "float16", "float32")  # dtypes of caches that methods score


def refuse_method(method: Method, facts: ModelFacts | None = None) -> None:
    """Refuse a method whose cache a serving engine cannot hold, or not with this model's RoPE."""
    if method.per_query_head:
        raise UsageError(
            f"{method.label} keeps a set per query head, a serving engine's cache has rows per KV "
            "head; use another preset or --engine embedded"
        )
    if method.positions == "cache" and facts is not None and (reason := facts.unturnable()):
        raise UsageError(
            f"{method.label} turns keys to their places in the cache, which is known for "
            f"{', '.join(TURNABLE)} with RoPE over whole heads: {reason}; "
            "use --set positions=logical or another preset"
        )


def refuse_shortened(options: EngineOptions, *names: str) -> None:
    """Refuse the beginning of a name that is looked at here: servers take it for the whole name.

    `names` are those that only this engine has.
    """
    parallel = (name for kind in _PARALLEL for name in _names(kind))
    whole = {"dtype", _KV_DTYPE, *_OVERRIDES, *parallel, *names}
    for given in options.engine_args:
        begun = given.partition(".")[0]
        meant = sorted(name for name in whole if name.startswith(begun))
        if meant and begun not in whole:
            raise UsageError(f"--engine-arg {given}: write the whole name, such as {meant[0]}")


def refuse_quantised(options: EngineOptions) -> None:
    """Refuse rows that the plug-in cannot score or move, and other ways to ask for a precision."""
    given = options.engine_args
    if options.kv_dtype and _KV_DTYPE in given:
        raise UsageError(f"--engine-arg {_KV_DTYPE}: --kv-dtype {options.kv_dtype} says the same")
    alike = {"auto", options.dtype, *(["bf16"] if options.dtype == "bfloat16" else [])}
    for name, values in (("dtype", {options.dtype}), (_KV_DTYPE, alike)):
        if name in given and given[name] not in values:
            raise UsageError(
                f"--engine-arg {name}={given[name]}: runs are labelled, and their bytes counted, "
                "by --dtype and --kv-dtype; use these"
            )
    if options.kv_dtype and options.method.name != "full":
        raise UsageError(
            f"--kv-dtype {options.kv_dtype}: the plug-in of {options.method.label} reads cached "
            "rows, and cannot at lower precision; use --method full, or --engine embedded, which "
            "simulates it"
        )


def offload_gb(method: Method) -> int:
    """Return the GB of host memory that a method asks for, to which rows may leave the GPU."""
    return method.offload if isinstance(method, Full) else 0


def refuse_offload(
    engine: str, arguments: Sequence[str], options: EngineOptions, gpu: bool
) -> None:
    """Refuse rows that leave a GPU where there is none, and two ways of asking for them."""
    if not offload_gb(options.method):
        return
    if given := [name for name in options.engine_args if name.partition(".")[0] in arguments]:
        raise UsageError(
            f"--engine-arg {given[0]}: --method {options.method.label} says the same; "
            "--set offload=GB is its size"
        )
    if not gpu:
        raise UsageError(
            f"--method {options.method.label}: {engine} moves cached rows between a GPU and this "
            "machine's memory, and runs on the CPU here; use --device cuda where there is a GPU"
        )


def refuse_unshared(engine: str, options: EngineOptions) -> None:
    """Refuse to share a prefix where it is shared anyway, or where its rows would change."""
    method, asked = options.method, f"prefix=shared of {options.method.label}"
    if method.prefix != "shared":
        return
    if method.name == "full":
        raise UsageError(
            f"{asked}: {engine} as shipped, which `full` is, has a prefix cache of its own; use "
            "--method full, or full-constrained with --set prefix=shared for the plug-in's"
        )
    if method.positions == "cache":
        raise UsageError(
            f"{asked}: positions=cache turns all keys at every event, so no row stays common; "
            "use --set positions=logical"
        )
    if method.compresses and method.protect == "none":
        raise UsageError(
            f"{asked}: {engine} shares rows that no event changes; use --set protect=system, or "
            "--engine embedded, which copies what an event changes"
        )
    _, facts = read_asked(options)
    if facts.window:
        raise UsageError(
            f"{asked}: {facts.family} has layers with a window, whose rows go back as it moves "
            "on; leave prefix=shared out"
        )


def check_context(options: EngineOptions, argument: str, margin: int = 0) -> None:
    """Refuse an engine's own argument that asks for more positions than the model has."""
    asked, (_, facts) = asked_context(options, argument), read_asked(options)
    if asked is not None and not 0 < asked - margin <= facts.context_limit:
        raise UsageError(
            f"--engine-arg {argument}={asked}: expected {margin + 1} to "
            f"{facts.context_limit + margin} for this model; --context-limit goes further where "
            "a longer context is known to work"
        )


def check_folder(
    engine: str, options: EngineOptions, unsupported: Callable[[ModelFacts], str]
) -> None:
    """Read a model folder; UsageError if its engine would crash on it or answer wrongly.

    `unsupported` says why, for this engine alone; empty if it would not.
    """
    (_, facts), method = read_asked(options), options.method
    if reason := facts.unevictable or unsupported(facts):
        raise UsageError(
            f"the {engine} engine does not run model family {facts.family!r}: it has {reason}; use "
            "another model or engine (docs/models.md)"
        )
    if method.name != "full" and not facts.full_layers:
        raise UsageError(
            f"every layer keeps a window of {facts.window} tokens, so there is nothing for a "
            f"method to evict in the {engine} engine; use --method full"
        )
    refuse_method(method, facts)
    given = [name for name in options.engine_args if name.partition(".")[0] in _OVERRIDES]
    if given and method.positions == "cache":
        raise UsageError(
            f"--engine-arg {given[0]}: {method.label} turns keys by the RoPE of the model's "
            "config.json; change it there"
        )


def refuse_arguments(engine: str, options: EngineOptions, parallel: Sequence[str]) -> None:
    """Refuse an engine's own arguments with which eviction would be wrong; `full` takes any.

    `parallel` are the kinds, such as `dp`, for which its plug-in does not work.
    """
    if options.method.name == "full":
        return
    wrong = {f"{_PARALLEL[kind]} parallelism": _names(kind) for kind in parallel}
    for name, value in options.engine_args.items():
        what = next((what for what, names in wrong.items() if name in names), "")
        if name == _KV_DTYPE and value not in _WIDE:
            what = "a quantised KV cache"
        elif not what or value in ("", "1"):
            continue
        if what:
            raise UsageError(
                f"--engine-arg {name}={value}: eviction in the {engine} engine does not support "
                f"{what}; leave it out, or use --method full"
            )


def refuse_divided(engine: str, options: EngineOptions) -> None:
    """Refuse tensor parallelism for a method that needs all heads in one worker.

    For any but `full` also if there are more workers than KV heads: each copy of a head would
    choose rows of its own.
    """
    if options.method.name == "full":
        return
    undivided = options.method.below().across_heads
    for name in _names("tp"):
        value = options.engine_args.get(name, "")
        if value in ("", "1"):
            continue
        if undivided:
            raise UsageError(
                f"--engine-arg {name}={value}: {options.method.label} in the {engine} engine does "
                f"not support {undivided} under tensor parallelism; leave it out, or use another "
                "method"
            )
        heads = read_model(model_path(options.model)).kv_heads
        if value.isdigit() and int(value) > heads:
            raise UsageError(
                f"--engine-arg {name}={value}: the model has {heads} KV heads, and eviction in the "
                f"{engine} engine needs one at least for each worker; use {name}={heads}"
            )


def _names(kind: str) -> tuple[str, ...]:
    return kind, f"{kind}-size", f"{_PARALLEL[kind].replace(' ', '-')}-parallel-size"


def read_asked(options: EngineOptions) -> tuple[Path, ModelFacts]:
    """Return a model's folder and what it says, with the context that was asked for."""
    path = stretched_folder(model_path(options.model), options.context_limit)
    facts = read_model(path)
    limit = options.context_limit or facts.context_limit
    return path, replace(facts, context_limit=min(limit, facts.context_limit))
