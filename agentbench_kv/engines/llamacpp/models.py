"""The models the engine can load: their shapes, those it must refuse, and where their files are."""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.engines.core.context import Yarn, stretch
from agentbench_kv.engines.core.gguf_header import (
    damaged,
    file_sha,
    read_metadata,
    read_rope_factors,
    rope_parameters,
)
from agentbench_kv.engines.core.gguf_tokenizer import tokenizer_folder
from agentbench_kv.engines.embedded.model import SHIPPED, folder_sha, model_path
from agentbench_kv.engines.llamacpp.gguf import ARCHITECTURES
from agentbench_kv.engines.serving.process import link_packages
from agentbench_kv.environments import home
from agentbench_kv.errors import KVBenchError, UsageError

ROW_TYPES = {"float32": 0, "float16": 1}  # of cached rows, with ggml's number
KV_ROW_TYPES = {"q8_0": 8, "q4_0": 2}  # those that nobody but llama.cpp reads


@dataclass(frozen=True)
class ModelShape:
    """Shapes of one model."""

    architecture: str  # llama.cpp's name
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope_base: float  # pair f turns by `rope_base ** (-2 f / head_dim)` radians per position,
    rope_factors: tuple[float, ...]  # divided by its factor if there are any
    yarn: Yarn | None  # asked for beyond what the file says
    interleaved: bool  # RoPE pairs are (x[2f], x[2f + 1]) instead of (x[f], x[f + head_dim / 2])
    context_limit: int  # positions a session may have
    vocabulary: int
    eos_token_ids: tuple[int, ...]  # they end the model's turn

    def bytes_per_token(self, dtype: str) -> int:
        size = 4 if dtype == "float32" else 2
        return 2 * self.layers * self.kv_heads * self.head_dim * size

    def in_halves(self, vectors: Tensor) -> Tensor:
        """Return keys or queries [..., head_dim] with RoPE pairs half a head apart.

        Methods know this order only; scores do not depend on it as long as both follow it.
        """
        if not self.interleaved:
            return vectors
        pairs = vectors.reshape(*vectors.shape[:-1], -1, 2)
        return torch.cat([pairs[..., 0], pairs[..., 1]], -1)

    def as_stored(self, vectors: Tensor) -> Tensor:
        """Return what `in_halves` gave in llama.cpp's order again."""
        if not self.interleaved:
            return vectors
        return torch.stack(vectors.chunk(2, -1), -1).flatten(-2)


def read_shape(path: Path, context_limit: int = 0) -> ModelShape:
    """Describe the model in a GGUF file; UsageError if its rows must not be moved."""
    return model_shape(read_metadata(path), read_rope_factors(path), context_limit)


def model_shape(
    metadata: Mapping[str, Any], factors: Sequence[float] = (), context_limit: int = 0
) -> ModelShape:
    """Describe a model from its file's header; UsageError where `refusal` has a reason.

    `factors` are those of `read_rope_factors`, `context_limit` as in `EngineOptions`. Any other
    error means that the header is not one.
    """
    if reason := refusal(metadata):
        raise _elsewhere(reason)
    try:
        rope = rope_parameters(metadata)
    except UsageError as error:
        raise _elsewhere(str(error)) from None
    name = str(metadata["general.architecture"])
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    heads = int(own["attention.head_count"])
    width = int(own["embedding_length"])
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    ends = metadata.get("kvbench.eos_token_ids") or dict.fromkeys(named)
    head_dim = int(own.get("attention.key_length", width // heads))
    if factors and (name != "llama" or 2 * len(factors) != head_dim or not min(factors) > 0):
        raise UsageError(
            f"{name} with {len(factors)} factors for its RoPE, which is not understood"
        )
    trained = int(own["context_length"])
    kind = "tensor" if factors else rope["rope_type"]
    yarn = stretch(name, trained, kind, context_limit)
    rope |= yarn.parameters() if yarn else {}
    scaled = rope_divisors(rope, head_dim)
    if factors and scaled:
        raise UsageError(f"{name} scales RoPE twice, in its header and by a tensor")
    return ModelShape(
        architecture=name,
        layers=int(own["block_count"]),
        query_heads=heads,
        kv_heads=int(own.get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        rope_base=rope["rope_theta"],
        rope_factors=tuple(factors) or scaled,
        yarn=yarn,
        interleaved=name == "llama",
        context_limit=context_limit or trained,
        vocabulary=int(own.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"])),
        eos_token_ids=tuple(int(end) for end in ends if end is not None),
    )


def _elsewhere(reason: str) -> UsageError:
    return UsageError(
        f"{reason}; run it with llama.cpp's own server and measure that through --engine api"
    )


def rope_divisors(rope: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """Return what scaled RoPE divides each pair's frequency by; () where it is plain.

    YaRN's factor for the attention besides multiplies a key as a whole, which turning leaves alone.
    """
    pairs = head_dim // 2
    if rope["rope_type"] == "default":
        return ()
    factor = float(rope["factor"])
    if rope["rope_type"] == "linear":
        return (factor,) * pairs

    def turning(turns: float) -> float:
        """Return the pair that turns so often within the original context."""
        span = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope["rope_theta"]))

    low = max(math.floor(turning(32.0)), 0)
    high = min(math.ceil(turning(1.0)), head_dim - 1)
    shares = (min(max((pair - low) / max(high - low, 1e-3), 0.0), 1.0) for pair in range(pairs))
    return tuple(1 / (1 - share + share / factor) for share in shares)


def refusal(metadata: Mapping[str, Any]) -> str:
    """Say why moving or saving single rows of a cache would be wrong; empty if it is not."""
    # The reasons are those of llama.cpp's memory classes at the pinned version.
    name = str(metadata.get("general.architecture", "?"))
    keys = {key.removeprefix(f"{name}.") for key in metadata}
    if any(key.startswith("ssm.") for key in keys):
        return f"{name} has recurrent layers, whose state cannot be saved or restored by rows"
    if "rope.dimension_sections" in keys:
        return f"{name} has M-RoPE: a token has several positions, and keys cannot be re-anchored"
    if metadata.get(f"{name}.attention.sliding_window"):
        return f"{name} has sliding-window layers, which forget rows that a method means to keep"
    if name not in ARCHITECTURES.values():
        known = ", ".join(sorted(set(ARCHITECTURES.values())))
        return f"{name} is not among the architectures whose attention was checked ({known})"
    key = metadata.get(f"{name}.attention.key_length")
    value = metadata.get(f"{name}.attention.value_length", key)
    turned = metadata.get(f"{name}.rope.dimension_count", key)
    if key is not None and (key != value or key != turned):
        return f"{name} with keys of {key}, values of {value} and RoPE over {turned} channels"
    if isinstance(metadata.get(f"{name}.attention.head_count_kv"), list):
        return f"{name} has layers with different numbers of KV heads"
    return ""


@dataclass(frozen=True)
class LlamaCppModel:
    """A model that the backend can load."""

    file: Path  # GGUF
    tokenizer: Path  # folder with the tokenizer in Hugging Face's form
    sha: str  # of the file, or of the folder it was converted from
    shape: ModelShape


def resolve_model(name: str, python: Path, context_limit: int = 0) -> LlamaCppModel:
    """Find the GGUF file, folder or shipped model `name`; `python` converts a folder, once."""
    path = Path(name).expanduser()
    if name not in SHIPPED and not path.is_dir():
        return _from_file(path, context_limit)
    folder = model_path(name)
    sha = folder_sha(folder)
    file = home() / "gguf" / f"{sha[:16]}.gguf"
    if not file.exists():
        convert_elsewhere(python, folder, file, tokenizer=False)
    return LlamaCppModel(file, folder, sha, read_shape(file, context_limit))


def convert_elsewhere(python: Path, folder: Path, out: Path, *, tokenizer: bool = True) -> None:
    """Convert a folder in the environment's interpreter; see `gguf.convert`."""
    arguments = [str(folder.absolute()), str(out.absolute())]
    if not tokenizer:
        arguments.append("--no-tokenizer")
    try:
        list(lines_of(python, "agentbench_kv.engines.llamacpp.gguf", arguments))
    except KVBenchError as error:
        raise UsageError(f"cannot convert {folder}: {error}") from None


def _from_file(path: Path, context_limit: int) -> LlamaCppModel:
    if not path.exists():
        raise UsageError(
            f"there is no model {path}; give a GGUF file, a model folder or: {', '.join(SHIPPED)}"
        )
    metadata = read_metadata(path)
    try:
        shape = model_shape(metadata, read_rope_factors(path), context_limit)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise damaged(path) from None  # a value of another type, or one that is not there
    return LlamaCppModel(path.absolute(), tokenizer_folder(path), file_sha(path), shape)


@contextmanager
def environment_of() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="kvbench-") as place:
        links = link_packages(Path(place) / "path", [], {})
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}
        yield {**kept, "PYTHONPATH": str(links)}


def lines_of(python: Path, module: str, arguments: Sequence[str]) -> Iterator[str]:
    """Run `python -m module` and yield its lines as they come."""
    command = (str(python), "-m", module, *arguments)
    with (
        environment_of() as environment,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                yield line.rstrip("\n")
        except GeneratorExit:
            process.kill()
            raise
        if process.wait():
            errors.seek(0)
            said = errors.read().strip().splitlines() or [f"exit code {process.returncode}"]
            raise KVBenchError(said[-1])
