"""Loading a Hugging Face decoder and describing it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.embedded.attention import ATTENTION_NAME, register
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.base import Method, QueryKind
from agentbench_kv.phases.tokens import quiet_library

SHIPPED = ("micro",)
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
MOVING_ROPE = ("dynamic", "longrope")  # kinds of RoPE whose frequencies change with the length
_MOST_LAYERS = 10_000  # more would be built, one by one, before anybody asked for their weights
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready for session attention, with the shapes the caches need."""

    network: Any
    path: Path
    sha: str
    shape: RowShape
    frequencies: Tensor
    rope_type: str
    rope_scale: float
    context_limit: int
    eos_token_ids: tuple[int, ...]


def cache_shape(model: LoadedModel, method: Method) -> RowShape:
    """Return the shape of rows under a method; UsageError if its keys cannot be moved."""
    if method.positions == "cache" and model.rope_type in MOVING_ROPE:
        raise UsageError(
            f"positions=cache needs fixed RoPE frequencies; this model's are {model.rope_type}"
        )
    return replace(
        model.shape,
        kv_heads=model.shape.q_heads if method.per_query_head else model.shape.kv_heads,
        with_sums=method.query_plan().kind is QueryKind.SUMS,
    )


def model_path(name: str) -> Path:
    """Return the folder of a shipped model or of the one the user names."""
    if name in SHIPPED:
        return Path(str(files("agentbench_kv.models"))) / name
    path = Path(name).expanduser()
    if not path.exists():
        if "/" in name or name.startswith((".", "~")):
            raise UsageError(f"model folder {name} does not exist; give a folder or one of: micro")
        raise unknown_name("model", name, SHIPPED)
    if not path.is_dir():
        raise PrerequisiteError(f"model {name} is not a folder; give a Hugging Face model folder")
    _check_documents(path)
    return path


def _check_documents(path: Path) -> None:
    """Refuse damaged settings of a model folder: loaders pass over most of them in silence."""
    layers = read_document(path / "config.json").get("num_hidden_layers", 1)
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:
        raise PrerequisiteError(
            f"{path / 'config.json'}: num_hidden_layers is {str(layers)[:40]}, expected 1 to "
            f"{_MOST_LAYERS}; download the model again"
        )
    for name in ("generation_config.json", "tokenizer_config.json"):
        file = path / name
        if file.exists():
            end_ids(read_document(file).get("eos_token_id"), file)


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder; PrerequisiteError if it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise PrerequisiteError(
            f"cannot read {path} ({error}); give a Hugging Face model folder"
        ) from None
    return document


def end_ids(found: Any, file: Path) -> tuple[int, ...]:
    """Return the ids of tokens that end a turn, of which a file has one, some or none."""
    ids = found if isinstance(found, list) else [found] * (found is not None)
    if not all(type(each) is int for each in ids):
        raise PrerequisiteError(
            f"{file}: eos_token_id is {str(found)[:40]}, expected a token's number or a list; "
            "download the model again"
        )
    return tuple(ids)


def pick_device(name: str) -> torch.device:
    """Resolve `auto` and check that a named device exists."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {name!r} is none; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PrerequisiteError("device cuda was asked for but torch sees no GPU; use --device cpu")
    return device


def free_tokens(bytes_per_token: int, least: int = 1, device: torch.device | None = None) -> int:
    """Return how many cached tokens fit in half of the free memory; too few are refused."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tokens = free // 2 // bytes_per_token
    if tokens < least:
        raise PrerequisiteError("no memory is free for a KV cache; close other programs")
    return int(tokens)


def check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)


def load_model(name: str, dtype: str, device: str) -> LoadedModel:
    check_dtype(dtype)
    return _load(model_path(name), dtype, str(pick_device(device)))


@lru_cache(maxsize=1)
def _load(path: Path, dtype: str, device: str) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    register()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    chosen = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION_NAME}
    try:
        with quiet_library():
            check_config(AutoConfig.from_pretrained(path, **local))
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, output_loading_info=True, **chosen, **local
            )
        network, report = loaded
        _check_whole(path, report["missing_keys"])
        return wrap_model(network.to(device).eval(), path, folder_sha(path))
    except KVBenchError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged folder can fail the libraries in any way
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PrerequisiteError(f"cannot load the model in {path}: {first}") from None


def _check_whole(path: Path, missing: Collection[str]) -> None:
    """Refuse weights that lack tensors, which would be drawn at random."""
    if missing:
        raise PrerequisiteError(
            f"the weights in {path} lack {len(missing)} tensors, such as {min(missing)}; "
            "download the model again"
        )


def wrap_model(network: Any, path: Path, sha: str) -> LoadedModel:
    """Describe a network that is already in memory; switches its attention to ours."""
    register()
    config = network.config
    check_config(config)
    network.set_attn_implementation(ATTENTION_NAME)
    parameter = next(network.parameters())
    rotary = network.model.rotary_emb
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    sizes = (int(config.num_hidden_layers), heads, kv_heads, head_dim)
    shape = RowShape(*sizes, parameter.dtype, parameter.device)
    return LoadedModel(
        *(network, path, sha, shape),
        frequencies=rotary.inv_freq.to(parameter.device),
        rope_type=str(getattr(rotary, "rope_type", "default")),
        rope_scale=float(getattr(rotary, "attention_scaling", 1.0)),
        context_limit=int(config.max_position_embeddings),
        eos_token_ids=_eos_ids(network),
    )


def check_config(config: Any) -> None:
    """Refuse decoders whose attention is not plain causal attention over all rows."""
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"model family {config.model_type!r} is not supported by the embedded engine; "
            f"supported: {', '.join(FAMILIES)}"
        )
    layers = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in layers or (config.model_type == "mistral" and window)
    if sliding and window is not None and window < config.max_position_embeddings:
        raise UsageError(
            f"the model uses a sliding window of {window} tokens; the embedded engine needs full "
            "attention (set sliding_window to null in config.json if the model allows it)"
        )


def folder_sha(path: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in {".json", ".jinja", ".safetensors"}:
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _eos_ids(network: Any) -> tuple[int, ...]:
    found = getattr(getattr(network, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = network.config.eos_token_id
    return end_ids(found, Path("config.json"))
