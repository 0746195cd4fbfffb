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

__all__ = ["LlamaCppModel", "convert_elsewhere", "resolve_model"]

_CONVERT = "agentbench_kv.engines.llamacpp.convert"


@dataclass(frozen=True)
class LlamaCppModel:
    """A model that the backend can load.

    Attributes
    ----------
    file : Path
        GGUF.
    tokenizer : Path
        Folder with the tokenizer in Hugging Face's form.
    sha : str
        Hash of the file, or of the folder it was converted from.
    """

    file: Path
    tokenizer: Path
    sha: str
    shape: ModelShape


def resolve_model(name: str, python: Path) -> LlamaCppModel:
    """Find the model a user names; a folder is converted into kvbench's own cache.

    Parameters
    ----------
    name : str
        A GGUF file, a Hugging Face folder or the name of a shipped model.
    python : Path
        Interpreter of the environment, which has what a conversion needs.

    Raises
    ------
    UsageError, PrerequisiteError
        If there is none, or it is one the engine refuses.
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
    """Convert a folder in the environment's interpreter.

    Parameters
    ----------
    python : Path
    folder, out, tokenizer
        As for `convert.convert`.

    Raises
    ------
    UsageError
        With what the conversion said, if it refused.
    """
    try:
        paths = [str(folder.absolute()), str(out.absolute())]
        list(lines_of(python, _CONVERT, paths if tokenizer else [*paths, "--no-tokenizer"]))
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
