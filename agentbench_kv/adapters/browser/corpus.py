"""A corpus: documents that stay on disk, their titles and URLs, a search index, and a name."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from agentbench_kv.adapters.browser.search import Bm25Index, DenseIndex
from agentbench_kv.adapters.data import VARIABLE, data_folder, file_sha256
from agentbench_kv.encoders.loading import encoder_sha, load_encoder
from agentbench_kv.errors import PrerequisiteError, UsageError

LINE_WIDTH = 80
ABOUT, DOCUMENTS, CATALOG = "corpus.json", "documents.jsonl", "catalog.jsonl"
BM25, DENSE = "bm25", "dense"
_PIN = re.compile(r"@([0-9a-f]{12})\Z")
_MEND = "kvbench data import-corpus SOURCE --name NAME"


@dataclass(frozen=True)
class Document:
    """One page of a corpus, in plain text."""

    id: str  # name in the source (`docid`, file path); the URL if it has none
    url: str  # what `open` takes; unique in a corpus
    title: str
    text: str


def lines_of(text: str, width: int = LINE_WIDTH) -> tuple[str, ...]:
    """Break a text into lines of at most `width` characters; empty lines stay."""
    return tuple(line for part in text.splitlines() for line in textwrap.wrap(part, width) or [""])


@dataclass(frozen=True)
class CorpusInfo:
    """What every result over a corpus says about it."""

    name: str  # chosen at import
    sha256: str  # of its documents in their order
    documents: int
    synthetic: bool  # made for tests: nothing measured on it is a benchmark's result

    @property
    def label(self) -> str:
        """Name, beginning of the hash and, where it applies, the warning."""
        mark = " (synthetic)" if self.synthetic else ""
        return f"{self.name}@{self.sha256[:12]}{mark}"


class Corpus:
    """Documents by number, by URL and by search.

    `keys` are (id, URL) of every document; `read`, from a document's number to the document, is
    called from many threads.
    """

    def __init__(
        self,
        info: CorpusInfo,
        keys: Sequence[tuple[str, str]],
        read: Callable[[int], Document],
        index: Bm25Index | DenseIndex,
    ) -> None:
        self.info = info
        self.index = index
        self.document = read
        self._numbers = {name: number for number, (name, _) in enumerate(keys)}
        self._numbers |= {url: number for number, (_, url) in enumerate(keys)}

    @classmethod
    def from_documents(
        cls, documents: Iterable[Document], name: str, *, synthetic: bool = False
    ) -> Self:
        """Build a corpus in memory; UsageError if there are no documents."""
        held = list(documents)
        if not held:
            raise UsageError(f"corpus {name!r} has no documents")
        sha = hashlib.sha256(b"".join(map(document_line, held))).hexdigest()
        index = Bm25Index.build(f"{each.title}\n{each.text}" for each in held)
        keys = [(each.id, each.url) for each in held]
        return cls(CorpusInfo(name, sha, len(held), synthetic), keys, held.__getitem__, index)

    @classmethod
    def load(cls, folder: Path, encoder: str | Path | None = None) -> Self:
        """Open an imported corpus; documents are read from disk as they are opened.

        With an `encoder` (its name or folder) search is dense instead of BM25. PrerequisiteError if
        it is not a corpus, was damaged or changed, or a library is missing.
        """
        info = _info(folder)
        documents = folder / DOCUMENTS
        if file_sha256(documents) != info.sha256:
            raise PrerequisiteError(
                f"{documents} is not what was imported (its sha256 differs from {ABOUT}'s); {_MEND}"
            )
        with (folder / CATALOG).open(encoding="utf-8") as stream:
            catalog = [json.loads(line) for line in stream]
        keys = [(name, url) for _, name, url in catalog]
        read = _reader(documents, [offset for offset, _, _ in catalog])
        index: Bm25Index | DenseIndex
        if encoder is None:
            index = Bm25Index.load(folder / BM25)
        else:
            index = DenseIndex.load(folder / DENSE, load_encoder(encoder), encoder_sha(encoder))
        return cls(info, keys, read, index)

    def number(self, key: str) -> int | None:
        """Return the number of the document with a URL or id; None if there is none."""
        bare = key.partition("#")[0]
        for spelled in (key, bare, unquote(bare)):
            if spelled in self._numbers:
                return self._numbers[spelled]
        return None

    def provenance(self) -> dict[str, Any]:
        return {**asdict(self.info), "retrieval": self.index.name}


def corpus_folder(name: str) -> Path:
    """Return the folder of a corpus given as a path, or as its name in the data folder.

    `@` and the first 12 digits of the hash it must have may follow. PrerequisiteError if there is
    none, or it has another hash.
    """
    pin = _PIN.search(name)
    name = _PIN.sub("", name)
    given, stored = Path(name).expanduser(), data_folder() / "corpora" / name
    for folder in (given, stored):
        if (folder / ABOUT).is_file():
            sha = _info(folder).sha256
            if pin and not sha.startswith(pin[1]):
                raise PrerequisiteError(
                    f"corpus {name!r} is {sha[:12]} now, not {pin[1]}; name it without @{pin[1]}"
                )
            return folder
    raise PrerequisiteError(
        f"no imported corpus {name!r}, neither as a folder nor in {stored.parent}; {_MEND}, "
        f"or set {VARIABLE}"
    )


def pinned(name: str) -> str:
    """Return a corpus' name with the beginning of its hash, so that it names its content.

    What cannot be found stays as it is: opening it says why.
    """
    if not name or _PIN.search(name):
        return name
    try:
        return f"{name}@{_info(corpus_folder(name)).sha256[:12]}"
    except PrerequisiteError:
        return name


def document_line(document: Document) -> bytes:
    text = json.dumps(asdict(document), ensure_ascii=False, sort_keys=True) + "\n"
    return text.encode("utf-8", "replace")


def _info(folder: Path) -> CorpusInfo:
    try:
        fields = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        return CorpusInfo(**{name: fields[name] for name in CorpusInfo.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrerequisiteError(f"{folder} is not an imported corpus ({error}); {_MEND}") from error


def _reader(path: Path, offsets: Sequence[int]) -> Callable[[int], Document]:
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    ends = [*offsets[1:], len(mapped)]

    def read(number: int) -> Document:
        return Document(**json.loads(mapped[offsets[number] : ends[number]]))

    return read
