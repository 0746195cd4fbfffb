"""Importing a corpus: its documents in one file, a catalogue, a search index and a hash.

Users have documents in folders, JSON lines or parquet. Of HTML the readable text is taken, enough
for encyclopedia articles; nothing is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.browser.corpus import (
    ABOUT,
    BM25,
    CATALOG,
    DENSE,
    DOCUMENTS,
    CorpusInfo,
    Document,
    document_line,
)
from agentbench_kv.adapters.browser.search import (
    Bm25Index,
    DenseIndex,
    need_bm25s,
)
from agentbench_kv.adapters.data import json_rows
from agentbench_kv.encoders.loading import encoder_sha, load_encoder
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.files import writing

_HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "math", "nav", "footer"})
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "br", "caption", "dd", "div", "dl", "dt",
    "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main",
    "ol", "p", "pre", "section", "table", "tbody", "thead", "tr", "ul",
})  # fmt: skip
_BLANK_LINES = re.compile(r"\n\s*\n+")
_IDS = ("docid", "_id", "id", "doc_id")
_URLS = ("url", "link", "source")
_TITLES = ("title", "name")
_TEXTS = ("text", "contents", "content", "body")
_FRONT_MATTER_TITLE = re.compile(r"\A---\s*\n(?:.*\n)*?title:\s*(.+)\n")
_BATCH = 256


class Article(HTMLParser):
    """Collects title, canonical URL and text while HTML is fed to it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.url = ""
        self._parts: list[str] = []
        self._hidden = 0
        self._in_title = False

    @property
    def text(self) -> str:
        """The text so far: a line a block, table cells separated by bars."""
        lines = (" ".join(line.split()) for line in "".join(self._parts).split("\n"))
        return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        if tag == "link" and fields.get("rel") == "canonical":
            self.url = fields.get("href") or ""
        self._hidden += tag in _HIDDEN
        # Drawings have titles too.
        self._in_title = self._in_title or (tag == "title" and not self._hidden)
        if tag in _BLOCKS:
            self._parts.append("\n")
        elif tag in {"td", "th"}:
            self._parts.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in _HIDDEN))
        self._in_title = self._in_title and tag != "title"
        if tag in _BLOCKS:
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._hidden:
            # Line breaks of the source mean nothing.
            self._parts.append(re.sub(r"\s+", " ", data))


def article(html: str) -> Article:
    parsed = Article()
    parsed.feed(html)
    parsed.close()
    parsed.title = " ".join(parsed.title.split())
    return parsed


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
    pairs = product(files, _READERS.items())
    known = [(path, read) for path, (end, read) in pairs if path.name.lower().endswith(end)]
    if not known:
        raise UsageError(f"{source} holds no {', '.join(_READERS)} file")
    for path, reader in known:
        try:
            yield from reader(path, root)
        except (OSError, EOFError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error


def _json_lines(path: Path, root: Path) -> Iterator[Document]:
    for number, row in json_rows(path):
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
    **dict.fromkeys((".jsonl", ".jsonl.gz"), _json_lines),
    ".parquet": _parquet,
    **dict.fromkeys((".txt", ".md", ".html", ".htm"), _whole_file),
}


@dataclass(frozen=True)
class Imported:
    """A finished import."""

    folder: Path
    info: CorpusInfo
    empty: int  # documents left out
    duplicates: int


def import_corpus(
    source: Path,
    folder: Path,
    name: str,
    *,
    synthetic: bool = False,
    encoder: str | Path | None = None,
) -> Imported:
    """Write the documents of `source` as a corpus; the folder appears only when it is complete.

    Documents without text are left out, and so are all but the first with the same URL. With an
    `encoder` (its name or folder) every document is also embedded.
    """
    need_bm25s()
    model = load_encoder(encoder) if encoder else None
    if folder.exists():
        raise UsageError(f"{folder} exists; choose another --to, or remove it first")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with writing(folder):
            part.mkdir(parents=True)
            sha256, kept, left_out = _write_documents(read_documents(source), part)
            if not kept:
                raise UsageError(f"{source} holds no document with text")
            info = CorpusInfo(name, sha256, kept, synthetic)
            Bm25Index.build(_texts(part)).save(part / BM25)
            if model and encoder:
                index = DenseIndex.build(list(_texts(part)), model, encoder_sha(encoder))
                index.save(part / DENSE)
            about = json.dumps({**asdict(info), "source": source.name}, indent=1)
            (part / ABOUT).write_text(about + "\n", encoding="utf-8")
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Imported(folder, info, left_out["empty"], left_out["duplicates"])


def _write_documents(documents: Iterable[Document], folder: Path) -> tuple[str, int, Counter[str]]:
    """Write the documents and their catalogue; return hash, count, and the counts left out."""
    digest, urls, left_out = hashlib.sha256(), set[str](), Counter[str]()
    with (folder / DOCUMENTS).open("wb") as out, (folder / CATALOG).open("wb") as catalog:
        for document in documents:
            if not document.text.strip():
                left_out["empty"] += 1
            elif document.url in urls:
                left_out["duplicates"] += 1
            else:
                row = json.dumps([out.tell(), document.id, document.url])
                catalog.write(f"{row}\n".encode())
                line = document_line(document)
                out.write(line)
                digest.update(line)
                urls.add(document.url)
    return digest.hexdigest(), len(urls), left_out


def _texts(folder: Path) -> Iterator[str]:
    with (folder / DOCUMENTS).open(encoding="utf-8", newline="\n") as stream:
        for line in stream:
            fields = json.loads(line)
            yield f"{fields['title']}\n{fields['text']}"
