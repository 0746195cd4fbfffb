"""Importing corpora in every form, opening them, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentbench_kv.adapters.browser import corpus as corpus_module
from agentbench_kv.adapters.browser import importing
from agentbench_kv.adapters.browser import search as search_module
from agentbench_kv.adapters.browser.corpus import Corpus, Document, corpus_folder, pinned
from agentbench_kv.adapters.browser.importing import Imported, article, import_corpus
from agentbench_kv.adapters.browser.search import DenseIndex, best_first
from agentbench_kv.errors import PrerequisiteError, UsageError

ROWS = [
    {"docid": "7", "url": "https://made.test/7", "title": "Seven", "text": "Seven swans."},
    {"docid": "8", "url": "https://made.test/8", "title": "Eight", "text": "Eight eels."},
]


def json_lines(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def imported(tmp_path: Path, source: Path) -> Imported:
    return import_corpus(source, tmp_path / "corpus", "made", synthetic=True)


def documents(made: Imported) -> list[Document]:
    corpus = Corpus.load(made.folder)
    return [corpus.document(number) for number in range(corpus.info.documents)]


def test_an_imported_corpus_reads_back(tmp_path: Path) -> None:
    made = imported(tmp_path, json_lines(tmp_path / "docs.jsonl"))
    corpus = Corpus.load(made.folder)
    assert corpus.document(1) == Document("8", "https://made.test/8", "Eight", "Eight eels.")
    assert corpus.index.search("swans", 3) == [0]
    assert corpus.number("8") == corpus.number("https://made.test/8") == 1
    assert corpus.info == made.info
    assert (made.info.name, made.info.documents, made.info.synthetic) == ("made", 2, True)
    assert made.info.label.endswith(" (synthetic)")


def test_the_hash_is_of_the_documents_and_the_same_in_memory(tmp_path: Path) -> None:
    made = imported(tmp_path, json_lines(tmp_path / "docs.jsonl"))
    held = Corpus.from_documents(documents(made), "elsewhere")
    assert held.info.sha256 == made.info.sha256
    other = Corpus.from_documents(documents(made)[::-1], "elsewhere")
    assert other.info.sha256 != made.info.sha256


def test_parquet_and_compressed_lines_hold_the_same_corpus(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra [parquet] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "docs.parquet")
    with gzip.open(tmp_path / "docs.jsonl.gz", "wt") as stream:
        stream.write("\n".join(json.dumps(row) for row in ROWS))
    hashes = {
        import_corpus(tmp_path / name, tmp_path / f"to-{name}", "made").info.sha256
        for name in ("docs.parquet", "docs.jsonl.gz")
    }
    hashes.add(imported(tmp_path, json_lines(tmp_path / "docs.jsonl")).info.sha256)
    assert len(hashes) == 1


def test_a_folder_of_texts_and_pages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "b").mkdir(parents=True)
    (source / "b" / "Two_Words.txt").write_text("plain")
    (source / "a.html").write_text(
        "<html><head><title>A  title</title><link rel='canonical' href='https://made.test/A'>"
        "<style>p{}</style></head><body><svg><title>no</title></svg><nav>menu</nav><p>One\ntwo<b>three</b></p>"
        "<script>x</script><table><tr><td>1</td><td>2</td></tr></table></body></html>"
    )
    (source / "image.png").write_bytes(b"no text")
    assert documents(imported(tmp_path, source)) == [
        Document("a.html", "https://made.test/A", "A title", "One twothree\n\n| 1 | 2"),
        Document("b/Two_Words.txt", "b/Two_Words.txt", "Two Words", "plain"),
    ]


def test_a_title_inside_the_text_is_found(tmp_path: Path) -> None:
    row = {"docid": "1", "url": "https://made.test/", "text": "---\ntitle: Inside\n---\nText."}
    (document,) = documents(imported(tmp_path, json_lines(tmp_path / "d.jsonl", [row])))
    assert document.title == "Inside"


def test_empty_and_repeated_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "text": "again"}, {"id": "9", "title": "x", "text": " "}]
    rows[-1]["text"] = "\u00a0."
    made = imported(tmp_path, json_lines(tmp_path / "d.jsonl", rows))
    assert (made.info.documents, made.duplicates) == (3, 1)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").write_text("  \n")
    (empty / "b.txt").write_text("something")
    assert import_corpus(empty, tmp_path / "c2", "made").empty == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{oops", "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", '{"title": "x"}', "has no text: expected a field"),
        ("a.jsonl", "", "holds no document with text"),
        ("a.bin", "x", "holds no .jsonl"),
        ("a.parquet", "x", "is not a parquet file"),
        ("a.jsonl.gz", "x", "cannot be read"),
    ],
)
def test_sources_that_are_refused_leave_nothing(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        import_corpus(source, tmp_path / "corpus", "made")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_missing_source_and_a_taken_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name a folder"):
        imported(tmp_path, tmp_path / "nowhere")
    source = json_lines(tmp_path / "d.jsonl")
    imported(tmp_path, source)
    with pytest.raises(UsageError, match="exists; choose another --to"):
        imported(tmp_path, source)


def test_a_corpus_that_changed_is_refused(tmp_path: Path) -> None:
    made = imported(tmp_path, json_lines(tmp_path / "d.jsonl"))
    path = made.folder / "documents.jsonl"
    path.write_text(path.read_text().replace("swans", "geese"))
    with pytest.raises(PrerequisiteError, match="not what was imported"):
        Corpus.load(made.folder)
    (made.folder / "corpus.json").write_text("{}")
    with pytest.raises(PrerequisiteError, match="is not an imported corpus"):
        Corpus.load(made.folder)


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    made = imported(tmp_path, json_lines(tmp_path / "d.jsonl"))
    (made.folder / "bm25" / "params.index.json").unlink()
    with pytest.raises(PrerequisiteError, match="import the corpus again"):
        Corpus.load(made.folder)


def test_a_corpus_is_found_by_name_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    with pytest.raises(PrerequisiteError, match="kvbench data import-corpus"):
        corpus_folder("mine")
    folder = tmp_path / "corpora" / "mine"
    import_corpus(json_lines(tmp_path / "d.jsonl"), folder, "mine")
    assert corpus_folder("mine") == folder == corpus_folder(str(folder))
    name = pinned("mine")
    assert re.fullmatch("mine@[0-9a-f]{12}", name)
    assert corpus_folder(name) == folder
    assert pinned(name) == name
    assert (pinned("other"), pinned("")) == ("other", "")
    with pytest.raises(PrerequisiteError, match=r"is .* now, not 000000000000"):
        corpus_folder("mine@000000000000")


def test_without_the_search_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "find_spec", lambda *_: None)
    with pytest.raises(PrerequisiteError, match="pip install bm25s"):
        imported(tmp_path, json_lines(tmp_path / "d.jsonl"))
    with pytest.raises(PrerequisiteError, match="pip install bm25s"):
        Corpus.from_documents([Document("a", "a", "a", "a")], "one")


def test_the_index_is_the_same_file_in_every_process(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "d.jsonl")
    code = (
        "import sys; from pathlib import Path;"
        "from agentbench_kv.adapters.browser.importing import import_corpus as run;"
        "run(Path(sys.argv[1]), Path(sys.argv[2]), 'made')"
    )
    found = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(source), str(folder)]
        subprocess.run(command, env=environment, check=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        found.append([(path.name, path.read_bytes()) for path in files])
    assert found[0] == found[1]


def test_documents_without_a_word() -> None:
    corpus = Corpus.from_documents(
        [Document("a", "a", "!", "..."), Document("b", "b", "b", "")], "x"
    )
    assert corpus.index.search("b", 2) == [1]
    assert corpus.index.search("a", 2) == []
    with pytest.raises(UsageError, match="holds a word"):
        Corpus.from_documents([Document("a", "a", "!", "...")], "x")


def test_bm25_by_hand() -> None:
    """Lucene's BM25: idf = ln(1 + (N - n + 0.5) / (n + 0.5)); k1 = 1.5, b = 0.75."""
    texts = ["a a b", "a c", "c c c c d"]
    retriever = search_module.Bm25Index.build(texts)._retriever
    lengths = [len(text.split()) for text in texts]
    mean = sum(lengths) / 3

    def score(word: str, number: int) -> float:
        holding = sum(word in text.split() for text in texts)
        idf = math.log(1 + (3 - holding + 0.5) / (holding + 0.5))
        count = texts[number].split().count(word)
        return idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * lengths[number] / mean))

    expected = [score("a", number) + score("c", number) for number in range(3)]
    assert retriever.get_scores(["a", "c"]).tolist() == pytest.approx(expected, rel=1e-6)


def test_an_empty_corpus_in_memory() -> None:
    with pytest.raises(UsageError, match="has no documents"):
        Corpus.from_documents([], "nothing")


class LetterCounts:
    """An encoder that can be checked by hand: how often a, b and c occur."""

    def encode(self, sentences: list[str], /) -> list[list[int]]:
        return [[text.count(letter) for letter in "abc"] for text in sentences]


def test_dense_search_and_its_file(tmp_path: Path) -> None:
    index = DenseIndex.build(["aab", "ccc", "abb", "aab"], LetterCounts(), "sha-1")
    assert index.search("aa", 3) == [0, 3, 2]
    index.save(tmp_path / "dense")
    assert DenseIndex.load(tmp_path / "dense", LetterCounts(), "sha-1").search("c", 1) == [1]
    with pytest.raises(PrerequisiteError, match="another encoder"):
        DenseIndex.load(tmp_path / "dense", LetterCounts(), "sha-2")
    with pytest.raises(PrerequisiteError, match="--encoder"):
        DenseIndex.load(tmp_path / "nowhere", LetterCounts(), "sha-1")
    embeddings = tmp_path / "dense" / "embeddings.npy"
    for damaged in (embeddings.read_bytes()[:100], b"", b"nothing of numpy's"):
        embeddings.write_bytes(damaged)
        with pytest.raises(PrerequisiteError, match="damaged"):
            DenseIndex.load(tmp_path / "dense", LetterCounts(), "sha-1")


def test_a_corpus_with_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text("{}")
    for module in (importing, corpus_module):
        monkeypatch.setattr(module, "load_encoder", lambda _: LetterCounts())
    rows = [{"url": name, "title": "-", "text": name} for name in ("a", "c", "b")]
    source = json_lines(tmp_path / "d.jsonl", rows)
    folder = import_corpus(source, tmp_path / "corpus", "made", encoder=encoder).folder
    corpus = Corpus.load(folder, encoder)
    assert corpus.index.search("bb", 1) == [2]
    assert corpus.provenance()["retrieval"] == "dense"
    assert Corpus.load(folder).provenance()["retrieval"] == "bm25"
    (encoder / "config.json").write_text("{ }")
    with pytest.raises(PrerequisiteError, match="made by another encoder"):
        Corpus.load(folder, encoder)


def test_a_missing_encoder(tmp_path: Path) -> None:
    made = imported(tmp_path, json_lines(tmp_path / "d.jsonl"))
    with pytest.raises(PrerequisiteError, match="no encoder in"):
        Corpus.load(made.folder, tmp_path / "nowhere")
    with pytest.raises(PrerequisiteError, match="no embeddings in"):
        Corpus.load(made.folder, "hash")


def test_a_named_encoder_searches_what_it_embedded(tmp_path: Path) -> None:
    rows = [
        {"url": "a", "title": "-", "text": "a grey harbour"},
        {"url": "b", "title": "-", "text": "bread and butter"},
    ]
    source = json_lines(tmp_path / "d.jsonl", rows)
    folder = import_corpus(source, tmp_path / "corpus", "made", encoder="hash").folder
    corpus = Corpus.load(folder, "hash")
    assert corpus.index.search("what butter", 1) == [1]
    assert corpus.index.search("Harbour?", 1) == [0]


def test_best_first_against_sorting() -> None:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(5)
    for _ in range(50):
        scores = generator.integers(0, 4, size=generator.integers(1, 30)).astype("float32")
        count = int(generator.integers(0, 35))
        expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
        assert best_first(scores, count).tolist() == expected


def test_broken_html_is_still_text() -> None:
    page = article("<p>open <b>bold<p>next</nav> &amp; on<script>never closed")
    assert page.text == "open bold\nnext & on"
