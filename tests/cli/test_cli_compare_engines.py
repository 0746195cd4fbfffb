"""`kvbench compare --engines` on real runs of the micro task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.run.runner import run_all
from agentbench_kv.run.spec import RunSpec, resolve

pytestmark = pytest.mark.slow

KvBench = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a real run under eviction."""
    out: Path = tmp_path_factory.mktemp("real")
    spec = RunSpec("embedded", "micro", "agentkv", 256, "micro/recall-1k", limit=2)
    run_all([resolve(spec, {})], out, lambda *_: None)
    return next(path.parent for path in out.glob("*/run.json"))


def elsewhere(run: Path, folder: Path) -> Path:
    """Copy a run as if another engine had made it."""
    shutil.copytree(run, folder)
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"engine": "embedded"', '"engine": "vllm"'))
    (folder / "summary.json").unlink(missing_ok=True)
    return folder


def test_a_copy_is_equal(kvbench: KvBench, run: Path, tmp_path: Path) -> None:
    result = kvbench("compare", "--engines", str(run), str(elsewhere(run, tmp_path / "copy")))
    assert result.returncode == 0, result.stderr
    assert "vllm" in result.stdout
    assert "micro/recall-1k, micro, agentkv at 256" in result.stdout


def test_a_changed_token_is_found_with_its_logit_gap(
    kvbench: KvBench, run: Path, tmp_path: Path
) -> None:
    copy = elsewhere(run, tmp_path / "copy")
    path = sorted(copy.glob("transcripts/*.json"))[0]
    document = json.loads(path.read_text())
    first = document["generated"][-1].split()
    chosen = int(first[1])
    document["generated"][-1] = " ".join([first[0], str(chosen + 1), *first[2:]])
    path.write_text(json.dumps(document))
    result = kvbench("compare", "--engines", str(run), str(copy), "--json")
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    (one,) = found["differences"]
    assert one["turn"] == len(document["generated"]) - 1
    assert (one["index"], one["tokens"]) == (1, [chosen, chosen + 1])
    assert one["gap"] > 0, one["note"]


def test_what_was_cut_off_or_cannot_be_read_is_not_equal(
    kvbench: KvBench, run: Path, tmp_path: Path
) -> None:
    copy = elsewhere(run, tmp_path / "runs" / "copy")
    lines = (copy / "samples.jsonl").read_text().splitlines(keepends=True)
    (copy / "samples.jsonl").write_text(lines[0] + lines[1][:40])
    result = kvbench("compare", "--engines", str(run), str(copy))
    assert result.returncode == 1
    assert "proves nothing: incomplete: 1 of 2 trials finished" in result.stdout
    assert "samples.jsonl" in result.stderr
    broken = elsewhere(run, tmp_path / "runs" / "broken")
    (broken / "run.json").write_text("{")
    result = kvbench("compare", "--engines", str(run), str(tmp_path / "runs"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "broken cannot be read (" in result.stderr
    result = kvbench("compare", "--engines", str(run), str(run))
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)


def test_more_than_two_runs_need_engines(kvbench: KvBench, run: Path) -> None:
    result = kvbench("compare", str(run), str(run), str(run))
    assert result.returncode == 2
    assert "--engines" in result.stderr
