"""Servers know what we write on their command lines, those of GPUs too, by written facts.

No engine is needed: `benchmarks/engine_options.py` has read their sources.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import engine_options
from engine_options import FACTS, facts, facts_file, known, written
from engine_symbols import TESTED

ALL = [(engine, version) for engine, versions in TESTED.items() for version in versions]


@pytest.fixture(autouse=True)
def _any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("engine", "version"), [pytest.param(*e, id="-".join(e)) for e in ALL])
def test_every_version_has_what_we_write(engine: str, version: str) -> None:
    there = json.loads(facts_file(engine, version).read_text(encoding="utf-8"))
    assert there.keys() == written(engine, version)


def test_command_lines_that_nothing_here_can_start_are_among_them() -> None:
    vllm, sglang = written("vllm", "0.33.0"), written("sglang", "0.5.23")
    assert {"--kv-offloading-size", "--kv-cache-dtype int8_per_token_head"} <= vllm
    assert {"--num-gpu-blocks-override", "VLLM_USE_V2_MODEL_RUNNER"} <= vllm
    assert {"--hicache-size", "--base-gpu-id", "--disable-prefill-cuda-graph"} <= sglang
    assert "--disable-piecewise-cuda-graph" in written("sglang", "0.5.12") - sglang


def test_there_are_facts_of_the_versions_that_are_taken_alone() -> None:
    assert {file.stem for file in FACTS.iterdir()} == {"-".join(each) for each in ALL}


def test_what_no_file_has_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine_options._READ, "vllm", ("engine/*.py", "envs.py"))
    for name, text in (
        ("engine/arg_utils.py", "class Args:\n    max_len: int = 1\n    prefix: bool = True\n"),
        ("engine/more.py", "parser.add_argument('--spelled')\nKinds = Literal['fp8']\n"),
        ("envs.py", "VLLM_A: str = ''\n"),
        ("elsewhere.py", "VLLM_B = 1\n"),
    ):
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    asked = ["--max-len", "--no-prefix", "--spelled", "--kind fp8", "VLLM_A"]
    gone = ["--max-length", "--kind int8", "VLLM_B"]
    found = facts([*asked, *gone], known("vllm", tmp_path))
    assert found.keys() == set(asked)
    assert found["--max-len"] == "vllm/engine/arg_utils.py"
