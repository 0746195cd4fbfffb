"""`--kv-dtype` from the command line to records and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentbench_kv.results.run_names import prefix_parts, run_id
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.serving_bench.bench import folder_of
from agentbench_kv.serving_bench.measurements import ServingArm, ServingPlan

SMALL = ("run", "--task", "micro/recall-1k", "--limit", "2", "--method", "full", "--quiet")


def test_runs_without_a_precision_keep_their_ids() -> None:
    spec = resolve(RunSpec("embedded", "micro", "full", None, "micro/recall-1k"), {})
    plain = spec.document()
    assert "kv_dtype" not in plain
    assert spec.id == run_id(prefix_parts(plain), plain)
    low = resolve(
        RunSpec("embedded", "micro", "full", None, "micro/recall-1k", kv_dtype="int8"), {}
    )
    assert low.document() == plain | {"kv_dtype": "int8"}
    assert low.id != spec.id
    assert RunSpec(**low.document()) == low


def test_folders_of_measurements_keep_their_names() -> None:
    arms = [ServingArm(name="full", method="full")]
    fields = {
        "engine": "embedded", "model": "micro", "arms": arms, "shapes": ["2k/256"],
        "loads": ["c8"], "turns": 3, "tool_tokens": 256, "think_time_s": 0.0, "sessions": None,
        "warmup": 2, "repeats": 9, "seed": 0,
    }  # fmt: skip
    plan = ServingPlan(**fields)
    # As written before traces, goodput and precisions.
    old = {
        "schema_version": 1, "dtype": None, "device": None, "weights": "loaded",
        "engine_args": {}, "allow_untested": False, "wire": "gateway", "together": False,
        **fields,
        "arms": [
            {"name": "full", "method": "full", "budget": None, "settings": {}, "url": None}
        ],
    }  # fmt: skip
    assert plan.document() == old
    assert folder_of(plan, Path("x")).name == run_id(["serving", "embedded", "micro"], old)
    assert ServingPlan.model_validate(old) == plan
    low = ServingPlan(**fields | {"arms": [ServingArm(name="a", method="full", kv_dtype="int8")]})
    assert low.document()["arms"][0]["kv_dtype"] == "int8"


def test_a_quantised_run_is_counted_in_its_bytes_and_is_nobodys_full(
    kvbench, tmp_path: Path
) -> None:
    for more in ((), ("--kv-dtype", "int4")):
        done = kvbench(*SMALL, *more)
        assert done.returncode == 0, done.stderr
    kept = {}
    for path in (tmp_path / "runs").glob("*/samples.jsonl"):
        spec = json.loads((path.parent / "run.json").read_text())
        kept[spec["spec"].get("kv_dtype", "")] = [
            json.loads(line)["kv"] for line in path.read_text().splitlines()
        ]
        if "kv_dtype" in spec["spec"]:
            assert spec["provenance"]["engine_details"]["kv_dtype"] == "int4, simulated"
    layers, heads, head_dim = 4, 2, 64
    for kv in kept[""]:
        assert kv["peak_bytes"] == kv["peak_live"] * 2 * layers * heads * head_dim * 4
    for kv in kept["int4"]:
        assert kv["peak_bytes"] == kv["peak_live"] * 2 * layers * heads * (head_dim // 2 + 4)

    shown = kvbench("report", "runs", "--table", "efficiency", "--format", "markdown").stdout
    heading = next(line for line in shown.splitlines() if line.startswith("| method "))
    columns = [name.strip() for name in heading.split("|")]
    assert columns.index("peak live MB") < columns.index("peak live")
    assert "| full kv=int4 simulated |" in shown
    accuracy = kvbench("report", "runs", "--table", "accuracy", "--format", "json")
    assert accuracy.returncode == 0, accuracy.stderr
    rows = [
        row["cells"][0]["value"]
        for table in json.loads(accuracy.stdout)["tables"]
        if "all samples" in table["title"]
        for row in table["rows"]
    ]
    assert "full" in rows
    assert "full kv=int4 simulated" in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-dtype", "int3"], "--kv-dtype int3: engine 'embedded' has no such rows"),
        (["--kv-dtype", "int8", "--engine", "llamacpp"], "it knows: q8_0, q4_0"),
        (["--kv-dtype", "kivi2", "--method", "agentkv", "--budget", "64"], "KIVI's keys share"),
        (
            ["--kv-dtype", "int8", "--method", "streamingllm@paper", "--budget", "64"],
            "turns cached keys to other positions",
        ),
    ],
)
def test_what_cannot_be_is_one_line(kvbench, arguments: list[str], message: str) -> None:
    done = kvbench("run", "--task", "micro/recall-1k", "--limit", "1", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


def test_bench_serving_measures_arms_at_each_precision_in_equal_memory(
    kvbench, tmp_path: Path
) -> None:
    done = kvbench(
        *("bench", "serving", "--budget", "64", "--set", "interval=8", "--shape", "150/24"),
        *("--turns", "1", "--concurrency", "4", "--sessions", "4", "--warmup", "0"),
        *("--repeats", "1", "--together", "--json", "--kv-dtype", "auto", "--kv-dtype", "int8"),
        *("--pool-mb", "1.5"),
    )
    assert done.returncode == 0, done.stderr
    cells = {cell["arm"]: cell for cell in json.loads(done.stdout)["cells"]}
    assert [*cells] == [
        *("full", "full-constrained", "agentkv 64"),
        *("full kv=int8 simulated", "agentkv 64 kv=int8 simulated"),
    ]
    for name in ("full", "agentkv 64"):
        plain, low = cells[name]["kv"], cells[f"{name} kv=int8 simulated"]["kv"]
        assert low["median_peak_live"] == plain["median_peak_live"]
        assert low["median_peak_bytes"] * 64 * 4 == plain["median_peak_bytes"] * (64 + 4)
    # 174 tokens of 4,096 bytes each: two sessions fit, at 1,088 bytes all four.
    assert cells["full"]["figures"]["max_concurrent_decodes"]["point"] <= 2
    folder = tmp_path / json.loads(done.stdout)["path"]
    rooms = {
        (found := json.loads(path.read_text()))["arm"]: found["server"]["max_live_tokens"]
        for path in folder.glob("rep*.json")
    }
    assert rooms["full"] == rooms["agentkv 64"] == 1_500_000 // 4096
    assert rooms["full kv=int8 simulated"] == 1_500_000 // 1088


def test_fidelity_plays_precisions_beside_the_full_cache(kvbench) -> None:
    done = kvbench(
        *("fidelity", "--task", "micro/recall-1k", "--limit", "1", "--quiet", "--json"),
        *("--method", "full", "--method", "agentkv", "--budget", "256"),
        *("--kv-dtype", "auto", "--kv-dtype", "int8", "--kv-dtype", "int4"),
    )
    assert done.returncode == 0, done.stderr
    kl = {found["method"]: found["means"]["kl"]["point"] for found in json.loads(done.stdout)}
    assert kl["full"] == 0
    assert 0 < kl["full kv=int8 simulated"] < kl["full kv=int4 simulated"]
    assert kl["agentkv"] != kl["agentkv kv=int4 simulated"]
