"""docs/notebooks/paper_plots.ipynb, executed on runs of the micro model, against their records."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "paper_plots.ipynb"
KVBENCH = (sys.executable, "-c", "from agentbench_kv.cli import main; main()")
GRID = "--task micro/recall-1k --budget 384 --budget 640 --method agentkv --method streamingllm"
# In a process of its own: what a kernel's sockets warn about is no error of ours.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=sys.argv[2])
nbformat.write(notebook, "executed.ipynb")
"""


def kvbench(folder: Path, command: str) -> str:
    done = subprocess.run(
        [*KVBENCH, *command.split()], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def execute(folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(folder)]
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make runs: full beside a small grid, one method on fewer samples, and fidelity."""
    pytest.importorskip("nbclient", reason="no nbclient: pip install -e '.[docs]'")
    place = tmp_path_factory.mktemp("paper")
    kvbench(place, "run --quiet --task micro/recall-1k --method full --limit 4")
    kvbench(place, f"run --quiet {GRID} --limit 3")
    kvbench(place, f"fidelity --quiet {GRID} --limit 3")
    # Its budget is never reached, so it is no valid run.
    kvbench(place, "run --quiet --task micro/recall-1k --method random --budget 9000 --limit 3")
    done = execute(place)
    assert done.returncode == 0, done.stderr
    return place


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_three_plots_are_made(folder):
    sizes = {each.name: each.stat().st_size for each in (folder / "plots").glob("*.pdf")}
    assert set(sizes) == {"accuracy.pdf", "bytes.pdf", "fidelity.pdf"}
    assert min(sizes.values()) > 5000
    executed = json.loads((folder / "executed.ipynb").read_text())
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 3


@pytest.mark.slow
def test_the_scores_are_those_of_the_reports_on_the_samples_that_all_have_played(folder):
    figures = read(folder / "plots" / "figures.csv")
    assert {row["method"] for row in figures} == {"full", "agentkv", "streamingllm"}  # all valid
    assert [row["samples"] for row in figures] == ["3"] * 5
    for row in figures:
        if row["method"] == "full":
            continue
        (run,) = folder.glob(f"runs/micro_recall-1k-{row['method']}-b{int(float(row['budget']))}-*")
        score = json.loads((run / "summary.json").read_text())["score"]
        found = [float(row[key]) for key in ("score", "low", "high")]
        assert found == pytest.approx([score[key] for key in ("point", "low", "high")])


@pytest.mark.slow
def test_the_distances_are_those_of_kvbench_fidelity(folder):
    distances = read(folder / "plots" / "distances.csv")
    assert len(distances) == 4
    for row in distances:
        name = f"{row['method']}-b{int(float(row['budget']))}"
        (run,) = folder.glob(f"runs/fidelity_micro_recall-1k_gold-{name}-*")
        lines = (run / "samples.jsonl").read_text().splitlines()
        metrics = [json.loads(line)["metrics"] for line in lines]
        total, count = (sum(each[f"kl_{part}"] for each in metrics) for part in ("total", "count"))
        assert float(row["kl"]) == pytest.approx(total / count)
        assert 0 <= float(row["low"]) <= float(row["kl"]) <= float(row["high"])


@pytest.mark.slow
def test_bytes_are_tokens_times_those_of_a_token_and_another_models_are_refused(folder):
    for row in read(folder / "plots" / "figures.csv"):
        tokens = float(row["peak_bytes"]) / 4096
        assert tokens == int(tokens)
        assert row["method"] == "full" or float(row["budget"]) <= tokens < 1100
    text = NOTEBOOK.read_text("utf-8")
    wrong = folder / "wrong.ipynb"
    assert text.count("2 * 4 * 2 * 64 * 4") == 1
    wrong.write_text(text.replace("2 * 4 * 2 * 64 * 4", "2 * 4 * 2 * 64 * 2"))
    arguments = [sys.executable, "-c", EXECUTE, str(wrong), str(folder)]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "bytes were read of a token" in done.stderr


def test_the_notebook_holds_no_path_of_a_machine():
    text = NOTEBOOK.read_text("utf-8")
    assert not [word for word in ("/root", "/home", "/tmp", "/work") if word in text]
