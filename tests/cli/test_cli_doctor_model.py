"""`kvbench doctor --model`: what a model is taken for before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.embedded.model import model_path

Kvbench = Callable[..., Any]
LLAMA_LIKE = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}<|im_start|>assistant
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_path("micro"), tmp_path / "model"))


def asked(kvbench: Kvbench, *args: str) -> dict[str, Any]:
    ran = kvbench("doctor", "--json", "--model", *args)
    assert ran.returncode == 0, ran.stderr
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def text_of(report: dict[str, Any], wanted: str) -> str:
    return "".join(text for phase, text in report["session"] if phase == wanted)


def test_a_model_in_order(kvbench: Kvbench) -> None:
    report = asked(kvbench, "micro")
    assert (report["tool_syntax"], report["phase_family"]) == ("hermes", "chatml")
    assert report["architecture"] == "Qwen3ForCausalLM (qwen3)"
    assert report["engines"]["embedded"] == "ok"
    assert report["signs"] == {"<tool_call>": "chat template and vocabulary"}
    assert set(report["checks"]) == {"calls", "parallel calls", "turn end", "phases"}
    assert set(report["checks"].values()) == {"ok"}
    assert report["refused"] == []
    assert "<|im_end|>" in report["stop_tokens"].values()
    assert "The weather service knows." in text_of(report, "think")
    assert '"city": "Oslo"' in text_of(report, "act")
    assert "19 degrees and sunny" in text_of(report, "tool")
    assert "It is sunny in Oslo." in text_of(report, "others")


def test_people_see_the_same_in_lines(kvbench: Kvbench) -> None:
    shown = kvbench("doctor", "--model", "micro").stdout
    assert "tool syntax     hermes (<tool_call> in chat template and vocabulary)" in shown
    assert "  tool   | 19 degrees and sunny" in shown
    assert "  act    | <tool_call>" in shown


def test_a_template_without_tools_is_named_with_the_cure(kvbench: Kvbench, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(LLAMA_LIKE)
    vocabulary = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(vocabulary.replace("tool_call>", "tool_xxxx>"))
    report = asked(kvbench, str(folder))
    assert report["tool_syntax"] == "none"
    (line,) = report["refused"]
    assert line.startswith("tools: ")
    assert "--tool-syntax: harmony" in line
    named = asked(kvbench, str(folder), "--tool-syntax", "json")
    assert (named["tool_syntax"], named["refused"]) == ("json", [])
    assert '"city": "Oslo"' in text_of(named, "act")
    assert named["checks"]["phases"] == "ok, but the template shows no thoughts"


def test_a_template_that_forgets_results_is_found(kvbench: Kvbench, folder: Path) -> None:
    forgets = LLAMA_LIKE.replace(
        "{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(forgets)
    report = asked(kvbench, str(folder))
    assert report["checks"]["calls"] == "the results are not shown"
    assert "calls: the results are not shown" in report["refused"]


def test_an_unknown_chat_format_and_a_missing_stop_are_said(kvbench: Kvbench, folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.exists():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 0}))
    assert "none of <|im_end|> is a stop token" in asked(kvbench, str(folder))["checks"]["turn end"]
    tokens = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokens.replace("<|im_start|>", "<|im_begin|>"))
    report = asked(kvbench, str(folder))
    assert report["phase_family"] == "plain"
    assert report["checks"]["phases"].endswith("all tokens are others")
    assert {phase for phase, _ in report["session"]} == {"others"}


def test_a_longer_context_that_the_tokenizer_knows_is_told(kvbench: Kvbench, folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 131072}))
    report = asked(kvbench, str(folder))
    factor = -(-131072 // report["context_limit"])
    assert f'"factor": {factor}.0' in report["longer_context"]


def test_an_architecture_that_no_engine_knows(kvbench: Kvbench, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "stablelm"}))
    engines = asked(kvbench, str(folder))["engines"]
    assert "'stablelm'" in engines["llamacpp"]
    assert "'stablelm'" in engines["embedded"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        lambda folder: shutil.rmtree(folder),
    ],
)
def test_what_is_no_model_is_one_line(
    kvbench: Kvbench, folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    ran = kvbench("doctor", "--model", str(folder))
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert str(folder) in ran.stderr


def test_a_gguf_file_is_looked_at_as_it_is(kvbench: Kvbench, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    made = kvbench("convert", "micro", "m.gguf")
    assert made.returncode == 0, made.stderr
    report = asked(kvbench, str(tmp_path / "m.gguf"))
    assert (report["architecture"], report["tool_syntax"]) == ("qwen3 (GGUF)", "hermes")
    assert report["template"] == "tokenizer.chat_template of m.gguf"
    assert set(report["checks"].values()) == {"ok"}
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((tmp_path / "m.gguf").read_bytes()[:3000])
    ran = kvbench("doctor", "--model", str(cut))
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
