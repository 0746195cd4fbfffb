"""Reading the documents of a corpus from where users have them: folders, JSON lines, parquet."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.browser.documents import Document
from agentbench_kv.adapters.browser.html_text import article
from agentbench_kv.errors import PrerequisiteError, UsageError

_IDS = ("docid", "_id", "id", "doc_id")
_URLS = ("url", "link", "source")
_TITLES = ("title", "name")
_TEXTS = ("text", "contents", "content", "body")
_FRONT_MATTER_TITLE = re.compile(r"\A---\s*\n(?:.*\n)*?title:\s*(.+)\n")
_BATCH = 256


def read_documents(source: Path) -> Iterator[Document]:
    """Yield the documents of a file or of all files below a folder, in the order of their paths.

    JSON lines (`.jsonl`, `.jsonl.gz`) and parquet hold a document a row: `text` (or `contents`,
    `content`, `body`) and, where there are, `title`, `url`, `docid` or `id`. Text, Markdown and
    HTML files are a document each. UsageError if the source is missing, holds nothing of these
    kinds, or a row has no text field.
    """
    if not source.exists():
        raise UsageError(f"no {source}: name a folder, .jsonl, .jsonl.gz or .parquet file")
    root = source if source.is_dir() else source.parent
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    known = [(path, reader) for path in files if (reader := _reader(path))]
    if not known:
        raise UsageError(f"{source} holds no {', '.join(_READERS)} file")
    for path, reader in known:
        try:
            yield from reader(path, root)
        except (OSError, EOFError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error


def _reader(path: Path) -> Callable[[Path, Path], Iterator[Document]] | None:
    return next((read for end, read in _READERS.items() if path.name.lower().endswith(end)), None)


def _json_lines(path: Path, root: Path) -> Iterator[Document]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UsageError(f"{path} line {number} is not a JSON object")
            yield _from_row(row, f"{_name(path, root)}:{number}")


def _parquet(path: Path, root: Path) -> Iterator[Document]:
    if find_spec("pyarrow") is None:
        raise PrerequisiteError(
            'reading parquet needs pyarrow, from the extra [parquet]: pip install ".[parquet]"'
        )
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(_BATCH) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield _from_row(row, f"{_name(path, root)}:{number}")
    except pyarrow.ArrowInvalid as error:
        raise UsageError(f"{path} is not a parquet file: {error}") from error


def _whole_file(path: Path, root: Path) -> Iterator[Document]:
    name, title = _name(path, root), path.stem.replace("_", " ")
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix.lower() in {".html", ".htm"}:
        page = article(text)
        yield Document(name, page.url or name, page.title or title, page.text)
    else:
        yield Document(name, name, title, text)


def _from_row(row: Mapping[str, Any], fallback: str) -> Document:
    text = _first(row, _TEXTS)
    if text is None:
        raise UsageError(
            f"{fallback} has no text: expected a field {', '.join(_TEXTS)}, found "
            f"{', '.join(sorted(row)) or 'none'}"
        )
    url = _first(row, _URLS)
    name = _first(row, _IDS) or url or fallback
    url = url or name
    inside = _FRONT_MATTER_TITLE.match(text[:2000])
    title = _first(row, _TITLES) or (inside[1].strip() if inside else "") or url
    return Document(name, url, title, text)


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    values = (row[name] for name in names if row.get(name) is not None)
    return next((text for value in values if (text := str(value).strip())), None)


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


_READERS: dict[str, Callable[[Path, Path], Iterator[Document]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".parquet": _parquet,
    ".txt": _whole_file,
    ".md": _whole_file,
    ".html": _whole_file,
    ".htm": _whole_file,
}
