"""Cost tables name vLLM's model runner of each run, where a run has one."""

from __future__ import annotations

import json

import pytest

from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import summarize
from agentbench_kv.results.tables.costs import efficiency_tables, throughput_tables


def write(folder, make_trial, name, runner, **spec):
    base = {"task": "micro/recall-1k", "model": "micro", "engine": "vllm", "seed": 0}
    told = {"model_runner": runner} if len(runner) == 2 else runner
    provenance = {"engine_details": told} if runner else {}
    with RunStore(folder).open(name, base | spec, expected_trials=8, provenance=provenance) as run:
        for i in range(8):
            kv = {"peak_live": 700, "logical": 1200, "events": 2, "longest_prefill": 300}
            kv |= {"decode_tokens": 20}
            run.append_trial(make_trial(f"s{i}", kv=kv, prompt_sha=f"{i:064x}"))
    path = folder / name / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "wall_s": 2.0}))
    summarize(RunReader(folder / name))


def test_model_runners_are_named(tmp_path, make_trial):
    write(tmp_path, make_trial, "full", "V2", method="full", budget=None)
    write(tmp_path, make_trial, "kv", "V1", method="agentkv", budget=600)
    runs = load_runs([tmp_path])[0]
    tables = [*efficiency_tables(runs), *throughput_tables(runs)]
    assert len(tables) == 2
    for table in tables:
        (note,) = [note for note in table.notes if note.startswith("vLLM's model runner, ")]
        assert "V2: full" in note
        assert "V1: agentkv" in note


@pytest.mark.parametrize("told", ["", "what somebody wrote there"])
def test_other_engines_have_no_such_line(tmp_path, make_trial, told):
    write(tmp_path, make_trial, "full", told, method="full", budget=None)
    (table,) = efficiency_tables(load_runs([tmp_path])[0])
    assert not any("runner" in note for note in table.notes)
