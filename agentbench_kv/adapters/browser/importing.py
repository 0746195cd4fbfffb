"""Importing a corpus: its documents in one file, a catalogue, a search index and a hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from agentbench_kv.adapters.browser.corpus import (
    ABOUT,
    BM25,
    CATALOG,
    DENSE,
    DOCUMENTS,
    CorpusInfo,
    document_line,
)
from agentbench_kv.adapters.browser.dense import DenseIndex, encoder_sha, load_encoder
from agentbench_kv.adapters.browser.documents import Document
from agentbench_kv.adapters.browser.search import Bm25Index, need_bm25s
from agentbench_kv.adapters.browser.sources import read_documents
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import writing


@dataclass(frozen=True)
class Imported:
    """A finished import."""

    folder: Path
    info: CorpusInfo
    empty: int  # documents left out
    duplicates: int


def import_corpus(
    source: Path, folder: Path, name: str, *, synthetic: bool = False, encoder: Path | None = None
) -> Imported:
    """Write the documents of `source` as a corpus; the folder appears only when it is complete.

    Documents without text are left out, and so are all but the first with the same URL. With an
    `encoder`, the folder of a local one, every document is also embedded.
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
