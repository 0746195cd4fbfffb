"""Loading a Hugging Face decoder and describing it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentbench_kv.engines.core.context import stretched_folder
from agentbench_kv.engines.core.gguf_header import SUFFIX, file_sha
from agentbench_kv.engines.core.gguf_tokenizer import tokenizer_folder
from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.embedded.architecture import Attention, read_attention, text_of
from agentbench_kv.engines.embedded.attention import ATTENTION_NAME, register
from agentbench_kv.engines.embedded.gguf_weights import gguf_config, load_gguf
from agentbench_kv.engines.embedded.packed_weights import pack_weights
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.base import Method, QueryKind
from agentbench_kv.phases.tokens import quiet_library

SHIPPED = ("micro",)
IN_MEMORY = "in-memory"  # in place of the hash of a model that is from no file
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# The decoder's weights of a multimodal folder, by what the decoder alone calls them.
_TEXT_WEIGHTS = {
    r"^(model\.)?language_model\.lm_head": "lm_head",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
MOVING_ROPE = ("dynamic", "longrope")  # kinds of RoPE whose frequencies change with the length
_MOST_LAYERS = 10_000  # more would be built, one by one, before anybody asked for their weights
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready for session attention, with the shapes the caches need."""

    network: Any
    path: Path
    sha: str
    attention: Attention
    shape: RowShape  # of the layers with full attention
    frequencies: Tensor  # of RoPE in those layers; fixed, whatever its kind
    window_frequencies: Tensor  # and in the layers that see a window
    rope_type: str
    rope_scale: float
    context_limit: int
    eos_token_ids: tuple[int, ...]

    @property
    def window_shape(self) -> RowShape:
        """Shape of the rows that layers with a window keep."""
        return replace(self.shape, layers=self.attention.windowed)


def cache_shape(model: LoadedModel, method: Method) -> RowShape:
    """Return the shape of rows under a method; UsageError if the model has no place for it."""
    model.attention.check_method(method)
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
        if path.suffix == SUFFIX:
            raise UsageError(f"there is no GGUF file {name}")
        if "/" in name or name.startswith((".", "~")):
            raise UsageError(f"model folder {name} does not exist; give a folder or one of: micro")
        raise unknown_name("model", name, SHIPPED)
    if path.suffix == SUFFIX:
        raise UsageError(
            f"{name} is a GGUF file, which --engine llamacpp and --engine embedded run; here give "
            "the Hugging Face folder it was made from"
        )
    if not path.is_dir():
        raise PrerequisiteError(f"model {name} is not a folder; give a Hugging Face model folder")
    _check_documents(path)
    return path


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a model's name is; None if it is none."""
    path = Path(name).expanduser()
    return path.absolute() if path.suffix == SUFFIX and path.is_file() else None


def tokenizer_path(name: str) -> Path:
    """Return the folder with a model's tokenizer and chat template."""
    file = gguf_file(name)
    return model_path(name) if file is None else tokenizer_folder(file)


def model_sha(name: str) -> str:
    file = gguf_file(name)
    return folder_sha(model_path(name)) if file is None else file_sha(file)


def _check_documents(path: Path) -> None:
    """Refuse damaged settings of a model folder: loaders pass over most of them in silence."""
    document = read_document(path / "config.json")
    nested = document.get("text_config")
    document = nested if isinstance(nested, dict) else document
    layers = document.get("num_hidden_layers", 1)
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
        free = free_memory()
    tokens = free // 2 // bytes_per_token
    if tokens < least:
        raise PrerequisiteError("no memory is free for a KV cache; close other programs")
    return int(tokens)


def free_memory() -> int:
    """Return the bytes that programs can still have, what the system caches of files included."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)


def load_model(name: str, dtype: str, device: str, context_limit: int = 0) -> LoadedModel:
    """Load a folder or a GGUF file; `context_limit` as in `EngineOptions`."""
    check_dtype(dtype)
    path = gguf_file(name) or stretched_folder(model_path(name), context_limit)
    model = _load(path, dtype, str(pick_device(device)), context_limit)
    limit = min(context_limit or model.context_limit, model.context_limit)
    return replace(model, context_limit=limit)


@lru_cache(maxsize=1)
def _load(path: Path, dtype: str, device: str, context_limit: int) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    register()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if path.suffix == SUFFIX:
        with _one_line(path), quiet_library():
            network = load_gguf(path, DTYPES[dtype], context_limit)
            pack_weights(network.to(device).eval())
            return wrap_model(network, tokenizer_folder(path), file_sha(path))
    chosen: dict[str, Any] = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION_NAME}
    with _one_line(path), quiet_library():
        config = AutoConfig.from_pretrained(path, **_LOCAL)
        read_attention(text_of(config))
        if text_of(config) is not config:
            chosen |= {"config": text_of(config), "key_mapping": _TEXT_WEIGHTS}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, **chosen, **_LOCAL
        )
        network, report = loaded
        _check_whole(path, report["missing_keys"])
        pack_weights(network.to(device).eval())
        return wrap_model(network, path, folder_sha(path))


def read_settings(name: str, context_limit: int = 0) -> Attention:
    """Describe a model by its settings alone; refuses as `load_model` does."""
    from transformers import AutoConfig

    file = gguf_file(name)
    if file is not None:
        with _one_line(file), quiet_library():
            tokenizer_folder(file)
            return read_attention(gguf_config(file, context_limit))
    path = stretched_folder(model_path(name), context_limit)
    with _one_line(path), quiet_library():
        return read_attention(text_of(AutoConfig.from_pretrained(path, **_LOCAL)))


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Make one line of whatever a damaged folder does to the libraries."""
    try:
        yield
    except KVBenchError:
        raise
    except Exception as error:  # noqa: BLE001  it can fail them in any way
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
    attention = read_attention(config)
    network.set_attn_implementation(ATTENTION_NAME)
    parameter = next(network.parameters())
    rope = fix_rope(network.model.rotary_emb, int(config.max_position_embeddings))
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    sizes = (attention.full, heads, kv_heads, head_dim)
    shape = RowShape(*sizes, parameter.dtype, parameter.device, interleaved=attention.interleaved)
    return LoadedModel(
        *(network, path, sha, attention, shape),
        frequencies=rope.full.to(parameter.device),
        window_frequencies=rope.windows.to(parameter.device),
        rope_type=rope.kind,
        rope_scale=rope.scale,
        context_limit=int(config.max_position_embeddings),
        eos_token_ids=_eos_ids(network),
    )


class FixedRope(NamedTuple):
    """RoPE's inverse frequencies [pairs] in full and in windowed layers, and its factor."""

    full: Tensor
    windows: Tensor
    kind: str
    scale: float


def fix_rope(rotary: Any, context: int) -> FixedRope:
    """Read a model's RoPE, and keep one whose frequencies follow the length from changing them.

    transformers sets them by the longest of all sessions in a forward, and keys that are cached
    would not follow. Dynamic RoPE is plain within the model's context, where all sessions end.
    LongRoPE takes the long factors if the context is longer than what the short ones are for, as
    vLLM and llama.cpp do, and transformers with any session that passes it.
    """
    kind = getattr(rotary, "rope_type", "default")
    if isinstance(kind, dict):
        if moving := sorted(set(kind.values()) & set(MOVING_ROPE)):
            raise UsageError(f"RoPE {moving[0]} of one type of layers is not supported")
        # "full_attention" comes before "sliding_attention"; a model may have one of them only.
        first, last = sorted(kind)[0], sorted(kind)[-1]
        tables = [getattr(rotary, f"{name}_inv_freq") for name in (first, last)]
        scale = float(getattr(rotary, f"{first}_attention_scaling", 1.0))
        return FixedRope(tables[0], tables[1], str(kind[first]), scale)
    if kind in MOVING_ROPE:
        # As transformers itself would compute them for a session that fills the context.
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.tensor([[context - 1]], device=rotary.inv_freq.device)
            rotary(torch.zeros(1, device=rotary.inv_freq.device), positions)
        rotary.rope_type = "default"
    scale = float(getattr(rotary, "attention_scaling", 1.0))
    return FixedRope(rotary.inv_freq, rotary.inv_freq, str(kind), scale)


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
