"""A past that was read once: later runs find it in files, and come to the same."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.engines.embedded.past import past_files
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.memory.files import _digest
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.run.engines import EngineShelf
from agentbench_kv.run.memories import check_banks, open_banks
from agentbench_kv.run.runner import run_all, run_one
from agentbench_kv.run.spec import RunSpec, resolve

FEW = {"topk": "24"}


def spec_of(settings: dict[str, str], limit: int = 2) -> RunSpec:
    spec = RunSpec("embedded", "micro", "memart", None, "micro/memory", limit=limit)
    return resolve(replace(spec, max_tokens=48, device="cpu"), settings)


def play(out: Path, settings: dict[str, str], banks: Path | None = None, limit: int = 2) -> Path:
    spec = spec_of(settings, limit)
    with EngineShelf(banks) as shelf:
        run_one(spec, out, lambda *_: None, shelf)
    return out / spec.id


def trials(run: Path) -> list[TrialRecord]:
    return sorted(RunReader(run).trials(), key=lambda each: each.key)


def timeless(run: Path) -> Any:
    """Return all that a run records but times, and what came from files."""

    def kept(name: str) -> bool:
        return not name.startswith("ingest_files") and not name.endswith(("_s", "ttft_ms_total"))

    records = []
    for record in trials(run):
        metrics = {name: value for name, value in record.metrics.items() if kept(name)}
        records.append((record.key, record.score, metrics, record.kv, record.usage))
    said = {
        path.name: json.loads(path.read_text())["generated"]
        for path in (run / "transcripts").glob("*.json")
    }
    return records, said


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of what a run of two samples has read, and the run without any."""
    root = tmp_path_factory.mktemp("banks")
    plain = play(root / "plain", FEW)
    first = play(root / "first", FEW, root / "banks")
    assert plain.name == first.name
    assert timeless(plain) == timeless(first)
    assert all("ingest_files" not in record.metrics for record in trials(first))
    return root / "banks"


@pytest.mark.parametrize(
    "settings",
    [FEW, {"topk": "40", "block": "8", "normalise": "rr", "aggregate": "sum"},
     {"topk": "24", "pick": "random"}],
    ids=["same", "other", "random"],
)  # fmt: skip
def test_with_files_it_is_the_same_run(
    banks: Path, settings: dict[str, str], tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in banks.iterdir()}
    found = play(tmp_path / "found", settings, banks)
    plain = play(tmp_path / "plain", settings)
    assert found.name == plain.name
    assert timeless(found) == timeless(plain)
    assert {path: path.stat().st_mtime_ns for path in banks.iterdir()} == before
    for record, fresh in zip(trials(found), trials(plain), strict=True):
        told = record.metrics
        assert told["ingest_files"] == told["ingest_calls"] == fresh.metrics["ingest_calls"]
        # What it cost is what it cost when the file was made.
        assert told["ingest_s"] > 0
        assert told["ingest_files_s"] > 0
    costs = [json.loads(about(path)["seconds"]) for path in banks.iterdir()]
    assert sum(record.metrics["ingest_s"] for record in trials(found)) == pytest.approx(sum(costs))


def about(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def test_a_damaged_file_is_made_anew(banks: Path, tmp_path: Path, caplog: Any) -> None:
    copy = tmp_path / "banks"
    copy.mkdir()
    for path in banks.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    first, second, third, *_ = sorted(copy.iterdir())
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    changed = bytearray(second.read_bytes())
    changed[-3] ^= 4
    second.write_bytes(changed)
    third.write_bytes(whole)  # of another session
    run = play(tmp_path / "runs", FEW, copy)
    assert timeless(run) == timeless(play(tmp_path / "plain", FEW))
    said = [record.getMessage() for record in caplog.records]
    assert sum("is no file of this past session" in line for line in said) == 3
    told = [record.metrics for record in trials(run)]
    read = sum(each["ingest_calls"] - each["ingest_files"] for each in told)
    assert read == 3
    for path in banks.iterdir():
        # Equal but for the cost, which is that of the day.
        assert about(copy / path.name)["about"] == about(path)["about"]
    again = play(tmp_path / "again", FEW, copy)
    assert all(r.metrics["ingest_files"] == r.metrics["ingest_calls"] for r in trials(again))


def test_the_rows_of_the_files_are_what_is_brought_back(banks: Path, tmp_path: Path) -> None:
    """A file is trusted like the model's: whoever writes it knows the sum of its content."""
    copy = tmp_path / "banks"
    copy.mkdir()
    for path in banks.iterdir():
        with safe_open(path, framework="pt") as file:
            keys, values = file.get_tensor("keys").clone(), file.get_tensor("values").clone()
        note = about(path)
        keys = keys.flip(2).contiguous()
        values.zero_()
        note["sha256"] = _digest(note["about"], note["seconds"], keys, values)
        save_file({"keys": keys, "values": values}, copy / path.name, note)
    forged = play(tmp_path / "forged", FEW, copy)
    assert timeless(forged) != timeless(play(tmp_path / "plain", FEW))


def test_an_interrupted_run_leaves_whole_files(tmp_path: Path) -> None:
    spec, folder = spec_of(FEW, 3), tmp_path / "banks"
    spec = replace(spec, concurrency=1)

    def stop(*told: Any) -> None:
        if told[-1] is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), EngineShelf(folder) as shelf:
        run_one(spec, tmp_path / "runs", stop, shelf)
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".tmp"}
    left = folder / ".x.safetensors.999999999.1.tmp"  # of a process that was killed yesterday
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    run_all([spec], tmp_path / "runs", lambda *_: None, folder)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}
    run_one(spec, tmp_path / "plain", lambda *_: None)
    assert timeless(tmp_path / "runs" / spec.id) == timeless(tmp_path / "plain" / spec.id)


def test_rows_are_of_one_model_precision_and_rope(tmp_path: Path) -> None:
    model = load_model("micro", "float32", "cpu")
    others: list[tuple[LoadedModel, str]] = [
        (replace(model, sha="0" * 64), ""),
        (replace(model, shape=replace(model.shape, dtype=torch.bfloat16)), ""),
        (model, "int8"),
        (replace(model, frequencies=model.frequencies * 2), ""),
        (replace(model, rope_scale=1.5), ""),
    ]
    paths = [past_files(tmp_path, *each).path([1, 2, 3]) for each in [(model, ""), *others]]
    assert len(set(paths)) == len(paths)
    shorter = past_files(tmp_path, replace(model, context_limit=99), "")
    assert shorter.path([1, 2, 3]) == paths[0], "what it reads is the same"


@pytest.mark.parametrize("limit", [{"context_limit": 200}, {"max_live_tokens": 200}])
def test_what_is_too_long_is_too_long_from_a_file_too(
    banks: Path, limit: dict[str, int], tmp_path: Path
) -> None:
    spec = replace(spec_of(FEW, 1), **limit)  # type: ignore[arg-type]
    run_one(spec, tmp_path / "plain", lambda *_: None)
    run_all([spec], tmp_path / "found", lambda *_: None, banks)
    (one,), (other,) = (trials(tmp_path / each / spec.id) for each in ("plain", "found"))
    assert one.status is other.status
    assert one.error == other.error
    assert one.score is None


def test_where_no_bank_is_kept_a_folder_is_refused(tmp_path: Path) -> None:
    full = resolve(RunSpec("embedded", "micro", "full", None, "micro/memory"), {})
    check_banks([full, spec_of(FEW)], tmp_path)
    with pytest.raises(UsageError, match="use --method memart"):
        check_banks([full], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PrerequisiteError, match="cannot write"):
        open_banks(tmp_path / "file" / "banks", spec_of(FEW).built_method)
    open_banks(tmp_path / "unused", full.built_method)
    assert not (tmp_path / "unused").exists()
