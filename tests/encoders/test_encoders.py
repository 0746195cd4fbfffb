"""Encoders: by name, from folders, and without any network."""

from __future__ import annotations

import json
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.adapters.browser.search import DenseIndex
from agentbench_kv.encoders import folder as folders
from agentbench_kv.encoders import words
from agentbench_kv.encoders.loading import FittedEncoder, encoder_sha, load_encoder
from agentbench_kv.errors import PrerequisiteError

needs_wordllama = pytest.mark.skipif(
    find_spec("wordllama") is None, reason="wordllama absent: pip install 'agentbench-kv[encoder]'"
)
TEXTS = ["She bought a car.", "He purchased an automobile", "The soup was cold", ""]


def cosine(first: Any, second: Any) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@given(st.lists(st.text(max_size=40), max_size=5))
def test_hashes_depend_on_the_words_alone(texts: list[str]) -> None:
    encoder = load_encoder("hash")
    found = encoder.encode(texts)
    assert found.shape == (len(texts), words.HASH_SIZE)
    assert np.isfinite(found).all()
    for text, row in zip(texts, found, strict=True):
        assert (encoder.encode([text])[0] == row).all()


def test_hashes_are_the_same_everywhere() -> None:
    (one, two, other) = load_encoder("hash").encode(["a Harbour", "harbour, A", "bread"])
    np.testing.assert_allclose(one, two, atol=1e-6)
    assert abs(cosine(one, other)) < 0.3
    assert one[:2] == pytest.approx(load_encoder("hash").encode(["a harbour"])[0][:2])
    assert len(encoder_sha("hash")) == 64


@needs_wordllama
@pytest.mark.usefixtures("offline")
def test_wordllama_knows_words_that_mean_the_same() -> None:
    car, automobile, soup, nothing = load_encoder("wordllama").encode(TEXTS)
    assert car.shape == (256,)
    assert car.dtype == np.float32
    assert cosine(car, automobile) > 0.4 > 0.2 > cosine(car, soup)
    assert not nothing.any()
    assert "wordllama" not in sys.modules  # its loader sets up logging and would download
    assert len(encoder_sha("wordllama")) == 64


@needs_wordllama
def test_fitted_to_texts_rare_words_weigh_more(tmp_path: Path) -> None:
    texts = [f"I was in the town of {name} and it was good" for name in ("Oslo", "Lima", "Quito")]
    plain = load_encoder("wordllama")
    assert isinstance(plain, FittedEncoder)
    fitted = plain.fitted(texts)
    assert plain.weights is None
    assert cosine(*fitted.encode(texts[:2])) < cosine(*plain.encode(texts[:2]))
    assert fitted.weights is not None
    assert (fitted.weights >= 0).all()
    again = plain.weighted(fitted.weights)
    assert (again.encode(texts) == fitted.encode(texts)).all()
    index = DenseIndex.build(texts, plain, "sha")
    index.save(tmp_path)
    found = DenseIndex.load(tmp_path, load_encoder("wordllama"), "sha")
    for query in ("Lima", "what of the Norwegian capital Oslo", ""):
        assert found.search(query, 3) == index.search(query, 3)
    assert found.search("it was good in Lima", 1) == [1]


@needs_wordllama
def test_wordllama_is_what_its_package_computes() -> None:
    """In a process of its own, as importing the package sets up the log of all of it."""
    import subprocess

    code = (
        "import json, pathlib, importlib.util as u\n"
        "from wordllama import WordLlama\n"
        "here = pathlib.Path(u.find_spec('wordllama').submodule_search_locations[0])\n"
        "model = WordLlama.load(cache_dir=here, disable_download=True)\n"
        f"print(json.dumps(model.embed({TEXTS[:3]!r}).tolist()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the package's own loader does not work: {done.stderr[-200:]}")
    theirs = np.array(json.loads(done.stdout.splitlines()[-1]))
    np.testing.assert_allclose(load_encoder("wordllama").encode(TEXTS[:3]), theirs, atol=1e-5)


def test_what_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrerequisiteError, match="name wordllama, hash"):
        load_encoder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PrerequisiteError, match="holds no sentence-transformers encoder") as caught:
        load_encoder(tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(words, "find_spec", lambda _: None)
    for call in (load_encoder, encoder_sha):
        with pytest.raises(PrerequisiteError, match=r"pip install 'agentbench-kv\[encoder\]'"):
            call("wordllama")


def bert(path: Path, pooling: dict[str, Any] | None, kinds: list[str]) -> Path:
    """Write a tiny random encoder in sentence-transformers' form."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    known = ["[PAD]", "[UNK]", *" ".join(TEXTS).replace(".", "").split()]
    made = Tokenizer(WordLevel({w: i for i, w in enumerate(dict.fromkeys(known))}, "[UNK]"))
    made.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=6
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    path.mkdir()
    BertModel(config).eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    if kinds:
        modules = [
            {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{kind}",
             "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ]  # fmt: skip
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (path / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
        if len(kinds) > 2:
            (path / f"2_{kinds[2]}").mkdir()
    return path


def mode(name: str) -> dict[str, Any]:
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
    return {"word_embedding_dimension": 16, **modes, name: True}


FORMS = {
    "bare": (None, []),
    "mean": (mode("pooling_mode_mean_tokens"), ["Transformer", "Pooling"]),
    "cls": (mode("pooling_mode_cls_token"), ["Transformer", "Pooling", "Normalize"]),
}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_pooled_as_it_says(form: str, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    path = bert(tmp_path / "model", *FORMS[form])
    encoder = folders.FolderEncoder(path)
    found = encoder.encode(TEXTS)
    model = AutoModel.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    for text, row in zip(TEXTS[:3], found, strict=False):
        ids = torch.tensor([tokenizer(text)["input_ids"][:6]])
        states = model(ids).last_hidden_state[0].detach()
        expected = states[0] if form == "cls" else states.mean(0)
        if form == "cls":
            expected = expected / expected.norm()
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-5)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_library_computes_the_same(form: str, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    path = bert(tmp_path / "model", *FORMS[form])
    theirs = folders.SentenceTransformersEncoder(path).encode(TEXTS[:3])
    np.testing.assert_allclose(folders.FolderEncoder(path).encode(TEXTS[:3]), theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "kinds", "said"),
    [
        (mode("pooling_mode_mean_tokens"), ["Transformer", "Pooling", "Dense"], "parts are"),
        (mode("pooling_mode_max_tokens"), ["Transformer", "Pooling"], "pooling is max"),
        (
            mode("pooling_mode_mean_tokens") | {"pooling_mode_cls_token": True},
            ["Transformer", "Pooling"],
            "cls, mean",
        ),
        (mode("pooling_mode_mean_tokens"), ["WordEmbeddings", "Pooling"], "parts are"),
    ],
)
def test_other_forms_need_the_library(
    pooling: Any, kinds: list[str], said: str, tmp_path: Path
) -> None:
    path = bert(tmp_path / "model", pooling, kinds)
    with pytest.raises(PrerequisiteError, match=f"needs sentence-transformers .*{said}"):
        folders.FolderEncoder(path)


def test_prompts_need_the_library(tmp_path: Path) -> None:
    path = bert(tmp_path / "model", *FORMS["mean"])
    about = path / "config_sentence_transformers.json"
    about.write_text('{"prompts": {"query": "", "document": ""}}')
    folders.FolderEncoder(path)
    about.write_text('{"prompts": {"query": "query: "}}')
    with pytest.raises(PrerequisiteError, match="it has prompts"):
        folders.FolderEncoder(path)


def test_a_folders_hash_follows_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = encoder_sha(tmp_path)
    assert encoder_sha(str(tmp_path)) == before
    (tmp_path / "config.json").write_text("{ }")
    assert encoder_sha(tmp_path) != before
