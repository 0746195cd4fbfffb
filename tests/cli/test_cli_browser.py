"""`kvbench data`, `kvbench browser` and `kvbench judge` as a user types them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bm25s", reason="the extra [browser] is not installed")

Kvbench = Callable[..., Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"url": "https://made.test/", "title": "T", "text": "One line."}\n')
    return path


def test_importing_a_corpus(kvbench: Kvbench, source: Path, tmp_path: Path) -> None:
    done = kvbench("data", "import-corpus", str(source), "--name", "mine", KVBENCH_DATA="data")
    assert done.returncode == 0
    assert done.stdout.startswith("mine@")
    assert (tmp_path / "data" / "corpora" / "mine" / "corpus.json").is_file()
    made = kvbench("data", "import-corpus", str(source), "--name", "b", "--to", "b",
                   "--synthetic", "--json")  # fmt: skip
    document = json.loads(made.stdout)
    assert (document["documents"], document["synthetic"]) == (1, True)
    again = kvbench("data", "import-corpus", str(source), "--name", "b", "--to", "b")
    assert again.returncode == 2
    assert again.stderr == "kvbench: b exists; choose another --to, or remove it first\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data", "import-corpus", "nowhere", "--name", "x"), "no nowhere: name a folder"),
        (("data", "import-corpus", "docs.jsonl", "--name", "../x"), "expected a plain name"),
        (("browser", "serve", "--corpus", "nowhere"), "no imported corpus 'nowhere'"),
        (("browser", "serve", "--corpus", "x", "--host", "0.0.0.0"), "no API key is set"),
        (("judge", "nowhere", "--endpoint", "http://h/v1", "--model", "m"), "not a run directory"),
        (("judge", "x", "--endpoint", "h", "--model", "m"), "expected URL|MODEL"),
    ],
)
def test_one_line_for_what_is_wrong(
    kvbench: Kvbench, source: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert source.is_file()
    done = kvbench(*arguments, KVBENCH_DATA="data")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_judging_a_finished_run(kvbench: Kvbench, tmp_path: Path) -> None:
    """A dead judge costs nothing that was there: exit code 1, the score as it was."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "frames_test_set.csv").write_text(
        "Prompt,Answer,wiki_links\nWhich bird?,A heron,['https://made.test/Heron']\n"
    )
    played = kvbench("run", "--engine", "scripted", "--model", "gold", "--task",
                     "frames/synthetic", "-q", "--json", KVBENCH_DATA="data")  # fmt: skip
    (document,) = json.loads(played.stdout)
    assert document["score"]["point"] == 1.0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    judge = ("judge", document["path"], "--endpoint", f"http://127.0.0.1:{port}/v1")
    done = kvbench(*judge, "--model", "m", "--json")
    assert done.returncode == 1
    assert done.stderr == "kvbench: no verdict: the judge cannot be asked: ConnectError\n"
    verdicts = json.loads(done.stdout)
    assert (verdicts["trials"], verdicts["judged"], verdicts["mean"]) == (1, 0, None)
    assert Path(verdicts["path"]).parent == Path(document["path"])


def test_a_taken_port(kvbench: Kvbench, source: Path) -> None:
    kvbench("data", "import-corpus", str(source), "--name", "b", "--to", "b")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = kvbench("browser", "serve", "--corpus", "b", "--port", port)
    assert done.returncode == 2
    assert "choose another --port" in done.stderr


def test_judging_a_run_of_locomo(kvbench: Kvbench, tmp_path: Path) -> None:
    """A dead judge: every line says how many verdicts are missing, and the exit code is 1."""
    pytest.importorskip("nltk", reason="the extra [locomo] is not installed")
    talk = {"speaker_a": "Ada", "speaker_b": "Ben", "session_1_date_time": "1 May, 2023"}
    talk["session_1"] = [{"dia_id": "D1:1", "speaker": "Ada", "text": "I was in Oslo."}]
    asked = [
        {"question": f"Where was {name}?", "answer": place, "evidence": ["D1:1"], "category": 4}
        for name, place in (("Ada", "Oslo"), ("Ben", "Lima"))
    ]
    document = [{"sample_id": "talk-1", "conversation": talk, "qa": asked}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "locomo10.json").write_text(json.dumps(document))
    run = ("run", "--task", "locomo/qa", "--engine", "scripted", "--model", "gold", "--method")
    made = kvbench(*run, "full", "--set", "check=off", "--json", KVBENCH_DATA="data")
    (path,) = (each["path"] for each in json.loads(made.stdout))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    judge = ("judge", path, "--endpoint", f"http://127.0.0.1:{port}/v1", "--model", "m")
    done = kvbench(*judge, "--controls", "1")
    assert done.returncode == 1
    assert "  strict, all: n/a: 2 of 2 without a verdict\n" in done.stdout
    assert "  generous, vague and wrong: n/a: 1 of 1 without a verdict\n" in done.stdout
    assert done.stderr == "kvbench: no verdict: the judge cannot be asked: ConnectError\n"
    verdicts = json.loads(next(Path(path).glob("judge-locomo-m-*.json")).read_bytes())
    assert len(verdicts["verdicts"]) == 2 * (2 + 3)
