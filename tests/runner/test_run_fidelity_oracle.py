"""`kvbench fidelity`'s figures against plain transformers, blind to what was evicted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fidelity_oracle

TOLERANCE = 1e-4
METHODS = ("agentkv", "snapkv", "streamingllm")


def sessions() -> list[dict[str, object]]:
    return [
        {
            "id": f"s{number}",
            "messages": [
                {"role": "user", "content": f"Find Anna's folder, whose code is 77{number}1-A."},
                {"role": "assistant", "content": f"It is x8{number}-q1, in the second row."},
                {"role": "user", "content": "And Bertil's, and where do they keep the keys?"},
                {"role": "assistant", "content": f"zz9{number}-b; the keys are in drawer 12."},
            ],
        }
        for number in range(2)
    ]


def test_figures_are_those_of_a_masked_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "s.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in sessions()))
    command = [str(file), "--model", "micro", "--budget", "64", "--set", "trigger=prefill+every"]
    command += ["--out", str(out)]
    command += [part for method in METHODS for part in ("--method", method)]
    monkeypatch.setattr(sys, "argv", ["fidelity_oracle.py", *command])
    fidelity_oracle.main()
    fidelity_oracle.main()  # nothing is computed twice
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * len(METHODS)
    for row in rows:
        assert row["events"] > 0
        assert row["mean_kl"] > 10 * TOLERANCE  # what was evicted is missed
        assert max(row[name] for name in fidelity_oracle.FIGURES) < TOLERANCE, row
