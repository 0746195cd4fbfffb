from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.store import RunStore

SCORED = {"status": "scored", "score": 1.0}


def _trial(sample: str = "s0", trial: int = 0, **fields: Any) -> TrialRecord:
    """Build a record; scored 1.0 unless told otherwise, KV figures as `kv={...}`."""
    base: dict[str, Any] = {"sample_id": sample, "trial": trial, "seed": 7}
    outcome = {} if "status" in fields else SCORED
    return TrialRecord(**(base | outcome | fields))


@pytest.fixture(scope="session")
def make_trial() -> Callable[..., TrialRecord]:
    return _trial


@pytest.fixture(scope="session")
def spec() -> dict[str, Any]:
    return {
        "task": "micro/recall-1k",
        "method": "agentkv",
        "budget": 256,
        "interval": 128,
        "engine": "embedded",
        "model": "models/micro",
        "seed": 3,
    }


HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\"'><a href=\"javascript:document.title='owned'\">click</a> \u202egnp.exe\u200f {{ 7 * 7 }}"
)


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE


@pytest.fixture(scope="session")
def site_runs(tmp_path_factory: pytest.TempPathFactory, spec: dict[str, Any]) -> Path:
    """Write seven runs: full, two methods at two budgets, a hostile one, an unfinished one."""
    root: Path = tmp_path_factory.mktemp("site") / "runs"
    for number, (method, budget, right) in enumerate(
        [
            ("full", None, 30),
            ("agentkv", 200, 12),
            ("agentkv", 400, 24),
            ("snapkv", 200, 4),
            ("snapkv", 400, 22),
        ]
    ):
        own = spec | {"method": method, "budget": budget}
        _write(root, f"{method}-{budget}", own, right, number)
    bad = spec | {"method": "h2o", "budget": 400, "model": "models/" + "m" * 60, "note": HOSTILE}
    _write(root, "hostile", bad | {"task": f"micro/{HOSTILE[:40]}"}, 5, 9, HOSTILE)
    _write(root, "unfinished", spec | {"method": "rkv", "budget": 400}, 10, 8, missing=5)
    return root


@pytest.fixture(scope="session")
def published_runs(tmp_path_factory: pytest.TempPathFactory, spec: dict[str, Any]) -> Path:
    """Write one run of a cell that a paper has figures for."""
    root: Path = tmp_path_factory.mktemp("published") / "runs"
    cell = {"task": "bfcl/multi_turn_base", "model": "Qwen/Qwen3-8B", "engine": "vllm"}
    _write(root, "ours", spec | cell | {"method": "rkv", "budget": 400}, 20, 1)
    return root


def _write(
    root: Path,
    name: str,
    spec: dict[str, Any],
    right: int,
    number: int,
    text: str | None = None,
    missing: int = 0,
) -> None:
    peak = 1000 if spec["budget"] is None else spec["budget"] + 180
    kv = {
        "peak_live": peak,
        "logical": 1000,
        "events": int(peak < 1000),
        "evicted": 1000 - peak,
        "longest_prefill": 90,
        "decode_tokens": 40 + number,
        "mean_decode_kv": peak / 2,
    }
    with RunStore(root).open(name, spec, expected_trials=32 + missing) as run, run.playing():
        for i in range(32):
            sample = f"s{i}" if text is None else f"s{i} {text}"
            run.append_turns(_turns(sample, peak))
            link = run.save_transcript(sample, 0, _transcript(text or "hello")) if i < 2 else None
            common = {"kv": kv, "prompt_sha": f"{i:064x}", "transcript": link}
            if i == 31:
                run.append_trial(_trial(sample, status="timeout", error=text, **common))
            else:
                metrics = {"think_right": i % 3, "think_asked": 2 + i % 2}
                run.append_trial(_trial(sample, score=float(i < right), metrics=metrics, **common))


def _turns(sample: str, peak: int) -> list[TurnRecord]:
    live = [peak // 2, peak - 40, peak - 60]
    return [
        TurnRecord(
            sample_id=sample,
            trial=0,
            turn=turn,
            live_before=live[turn - 1] if turn else 0,
            live_after=live[turn],
            events=int(turn == 2),
            evicted=60 * (turn == 2),
        )
        for turn in range(3)
    ]


def _transcript(text: str) -> dict[str, Any]:
    call = {"function": {"name": text, "arguments": text}}
    return {
        "transcript": [
            {"role": text, "content": text},
            {"role": "assistant", "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "content": "long " + text + "x" * 1_000_000},
        ]
    }
