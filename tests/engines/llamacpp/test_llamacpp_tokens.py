"""Tokenizers written from GGUF files against llama.cpp's own, on random and hostile texts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentbench_kv.engines.core.gguf_header import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from agentbench_kv.engines.core.gguf_tokenizer import PRETOKENIZERS, tokenizer_folder
from agentbench_kv.engines.embedded.model import model_path, read_document
from agentbench_kv.errors import UsageError
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer

gguf = pytest.importorskip("gguf", reason="writing files needs gguf: pip install -e '.[llamacpp]'")

BYTE = 6
SPACE = "\u2581"
LETTERS = [*"ab1.,'", SPACE, "\n", "é", "中"]
Vocabulary = dict[str, Any]
Made = tuple[list[str], list[int]]
Theirs = Callable[[Path, list[str], bool], list[tuple[list[int], str]]]


def pieces(seed: int) -> tuple[Vocabulary, Made]:
    """A SentencePiece vocabulary whose tokens overlap wherever they can, best ones first."""
    random = Random(seed)
    tokens = ["<unk>", "<s>", "</s>", "[INST]", "  ", *(f"<0x{i:02X}>" for i in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256]
    joined: list[str] = []
    while len(joined) < 300:
        token = random.choice([*LETTERS, *joined]) + random.choice([*LETTERS, *joined])
        if token not in joined and len(token) < 12:
            joined.append(token)
    tokens += joined + LETTERS
    types += [NORMAL] * (len(joined) + len(LETTERS))
    scores = [0.0] * 261 + [-float(i) for i in range(len(joined))]
    scores += [-1000.0 - i for i in range(len(LETTERS))]
    fields = {"model": "llama", "scores": scores, "unknown_token_id": 0, "eos_token_id": 2}
    return fields, (tokens, types)


def micro(pre: str) -> tuple[Vocabulary, Made]:
    """The micro model's byte-level vocabulary, split by another pre-tokenizer's rules."""
    document = read_document(model_path("micro") / "tokenizer.json")
    words = {index: token for token, index in document["model"]["vocab"].items()}
    added = {each["id"]: each["content"] for each in document["added_tokens"]}
    ids = range(max({**words, **added}) + 1)
    tokens = [added.get(i) or words.get(i) or f"[PAD{i}]" for i in ids]
    types = [CONTROL if i in added else NORMAL for i in ids]
    merges = [" ".join(m) if isinstance(m, list) else m for m in document["model"]["merges"]]
    return {"model": "gpt2", "pre": pre, "merges": merges, "eos_token_id": 2}, (tokens, types)


def written(path: Path, made: tuple[Vocabulary, Made], **more: Any) -> Path:
    """Write a file without weights."""
    fields, (tokens, types) = made
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in {**fields, **more}.items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def texts(seed: int, tokens: list[str], special: list[str], count: int) -> list[str]:
    """Random texts: of tokens, of letters, of runs, of any characters, of markers cut in two."""
    random = Random(seed)
    plain = [t.replace(SPACE, " ").replace("Ġ", " ").replace("Ċ", "\n") for t in tokens]
    odd = "".join(map(chr, (*range(1, 0x250), *range(0x900, 0x980), *range(0x1F300, 0x1F340))))
    parts: list[Callable[[], str]] = [
        partial(random.choice, plain),
        partial(random.choice, [*LETTERS, " "]),
        lambda: random.choice([*LETTERS, " ", "ab", "aab"]) * random.randint(1, 9),
        partial(random.choice, odd),
        partial(random.choice, [*special, "<", "</s", "[INS", " "]),
    ]
    made = []
    for _ in range(count):
        part = random.choice(parts)
        made.append("".join(part() for _ in range(random.randint(1, 20))))
    return made


@pytest.fixture(scope="module")
def theirs(llamacpp_python: Path, backend_environment: Callable[[], Any]) -> Theirs:
    script = Path(__file__).with_name("backend_tokens.py")

    def run(path: Path, asked: list[str], prefix: bool) -> list[tuple[list[int], str]]:
        word = "prefix" if prefix else "plain"
        command = (str(llamacpp_python), str(script), str(path), word)
        with backend_environment() as environment:
            done = subprocess.run(
                command, input=json.dumps(asked), env=environment, capture_output=True, text=True
            )
        assert done.returncode == 0, done.stderr
        found: list[tuple[list[int], str]] = json.loads(done.stdout)
        return found

    return run


@pytest.mark.engine
@pytest.mark.parametrize(
    ("made", "more"),
    [
        *((pieces(seed), {}) for seed in range(3)),
        (pieces(3), {"add_space_prefix": False}),
        *((micro(pre), {}) for pre in PRETOKENIZERS),
    ],
    ids=[*(f"pieces {i}" for i in range(3)), "no prefix", *PRETOKENIZERS],
)
def test_texts_become_the_tokens_of_llama_cpp(
    made: tuple[Vocabulary, Made],
    more: Vocabulary,
    theirs: Theirs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    path = written(tmp_path / "v.gguf", made, **more)
    codec = TokenCodec(load_tokenizer(tokenizer_folder(path)))
    asked = texts(1, made[1][0], list(codec.added), 1500)
    prefix = made[0]["model"] == "llama" and more.get("add_space_prefix", True)
    for text, (ids, back) in zip(asked, theirs(path, asked, prefix), strict=True):
        assert codec.encode(text) == ids, text
        assert codec.decode(ids) == back, text


@pytest.mark.parametrize(
    ("change", "said"),
    [({"model": "t5"}, "'t5'; kvbench reads"), ({"model": "llama"}, "no token for 256 of 256")],
)
def test_other_tokenizers_are_one_line(
    change: Vocabulary, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    path = written(tmp_path / "v.gguf", micro("qwen2"), **change)
    with pytest.raises(UsageError, match=said):
        tokenizer_folder(path)
