"""`--context-limit` and `--max-live-tokens`: a run ends at the limit, and is another run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_a_run_with_a_limit_ends_at_it_and_is_another_run(
    kvbench: Callable[..., Any], tmp_path: Path
) -> None:
    shared = ("--task", "micro/recall-1k", "--limit", "1", "--out", str(tmp_path), "--json")
    sizes = ("--context-limit", "300", "--max-live-tokens", "4096")
    (limited,) = json.loads(kvbench("run", *shared, *sizes).stdout)
    run = json.loads((Path(limited["path"]) / "run.json").read_text())
    assert (run["spec"]["context_limit"], run["spec"]["max_live_tokens"]) == (300, 4096)
    assert run["provenance"]["context_limit"] == 300
    trial = json.loads((Path(limited["path"]) / "samples.jsonl").read_text().splitlines()[0])
    assert trial["status"] == "context_limit"
    assert trial["kv"]["logical"] <= 300
    plan = kvbench("run", *shared, "--dry-run").stdout
    assert limited["run_id"] not in plan
