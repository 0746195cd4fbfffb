"""Which model is meant: a GGUF file, or a Hugging Face folder that is converted once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agentbench_kv.engines.embedded.model import SHIPPED, folder_sha, model_path
from agentbench_kv.engines.llamacpp.elsewhere import lines_of
from agentbench_kv.engines.llamacpp.metadata import read_metadata
from agentbench_kv.engines.llamacpp.shape import ModelShape, model_shape
from agentbench_kv.engines.llamacpp.tokenizer_folder import write_tokenizer
from agentbench_kv.environments import home
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError


@dataclass(frozen=True)
class LlamaCppModel:
    """A model that the backend can load."""

    file: Path  # GGUF
    tokenizer: Path  # folder with the tokenizer in Hugging Face's form
    sha: str  # of the file, or of the folder it was converted from
    shape: ModelShape


def resolve_model(name: str, python: Path) -> LlamaCppModel:
    """Find the GGUF file, Hugging Face folder or shipped model called `name`.

    A folder is converted once, into kvbench's own cache, by the environment's interpreter `python`.
    """
    path = Path(name).expanduser()
    if name not in SHIPPED and not path.is_dir():
        return _from_file(path)
    folder = model_path(name)
    sha = folder_sha(folder)
    file = home() / "gguf" / f"{sha[:16]}.gguf"
    if not file.exists():
        convert_elsewhere(python, folder, file, tokenizer=False)
    return LlamaCppModel(file, folder, sha, model_shape(read_metadata(file)))


def convert_elsewhere(python: Path, folder: Path, out: Path, *, tokenizer: bool = True) -> None:
    """Convert a folder in the environment's interpreter; see `convert.convert`."""
    arguments = [str(folder.absolute()), str(out.absolute())]
    if not tokenizer:
        arguments.append("--no-tokenizer")
    try:
        list(lines_of(python, "agentbench_kv.engines.llamacpp.convert", arguments))
    except KVBenchError as error:
        raise UsageError(f"cannot convert {folder}: {error}") from None


def _from_file(path: Path) -> LlamaCppModel:
    if not path.exists():
        raise UsageError(
            f"there is no model {path}; give a GGUF file, a model folder or: {', '.join(SHIPPED)}"
        )
    metadata = read_metadata(path)
    shape = model_shape(metadata)
    sha = _file_sha(path, path.stat().st_size, path.stat().st_mtime_ns)
    folder = home() / "gguf" / f"tokenizer-{sha[:16]}"
    if not (folder / "tokenizer_config.json").exists():
        try:
            write_tokenizer(metadata, folder)
        except OSError as error:
            raise PrerequisiteError(f"cannot write {folder}: {error.strerror}") from error
    return LlamaCppModel(path.absolute(), folder, sha, shape)


@lru_cache(maxsize=8)
def _file_sha(path: Path, size: int, modified_ns: int) -> str:  # noqa: ARG001  the cache's key
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
