"""`kvbench analyze`: tables, JSON and pictures of every analysis, end to end."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench, main

TOKENS = 120


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a capture of two layers, to run in."""
    monkeypatch.chdir(tmp_path)
    for name in [key for key in os.environ if key.startswith("KVBENCH_")]:
        monkeypatch.delenv(name)
    rng = np.random.default_rng(0)
    np.savez(
        "in.npz",
        q=rng.standard_normal((2, 4, TOKENS, 8)).astype(np.float16),
        k=rng.standard_normal((2, 2, TOKENS, 8)).astype(np.float16),
        v=rng.standard_normal((2, 2, TOKENS, 8)).astype(np.float16),
        phase=np.repeat([3, 0, 1, 2, 0, 1, 2, 3], TOKENS // 8),
        prompt=15,
    )
    np.savez("bare.npz", **{name: rng.random((1, 20, 4), np.float32) for name in "qkv"})
    return tmp_path


def invoke(*args):
    done = CliRunner().invoke(kvbench, ["analyze", *args], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


COVERAGE = ("coverage", "--capture", "in.npz", "--budget", "24", "--interval", "32")
REPLAY = ("--method", "agentkv", "--budget", "30", "--set", "interval=16")
CASES = {
    "angles": ("angles", "--capture", "in.npz", "--capture", "in.npz", "--k", "3"),
    "coverage": (*COVERAGE, "--recent", "8", "--representatives", "8", "--layer", "1"),
    "tsne": ("tsne", "--capture", "in.npz", "--at", "0:3", "--at", "1:0", "--per-phase", "6"),
    "timeline": ("timeline", "--capture", "in.npz", *REPLAY),
}
TABLES = {
    "angles": ["inter-phase", "heads with inter > intra"],
    "coverage": ["oracle", "multiscale", "of oracle"],
    "tsne": ["silhouette of phases"],
    "timeline": ["tool kept/seen"],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("folder")
def test_table_json_and_picture(name, folder):
    table = invoke(*CASES[name], "--plot", "x.png")
    assert (folder / "x.png").stat().st_size > 0
    assert all(text in table for text in TABLES[name])
    document = json.loads(invoke(*CASES[name], "--json", "--plot", "y.svg"))
    assert (folder / "y.svg").stat().st_size > 0
    assert document["analysis"] == name
    assert document["files"] == ["in.npz"] * (2 if name == "angles" else 1)


@pytest.mark.usefixtures("folder")
def test_what_the_documents_say():
    angles, coverage, tsne, timeline = (json.loads(invoke(*CASES[n], "--json")) for n in CASES)
    # Eight spans a capture: 28 pairs, of which one pair per phase is within it.
    assert (angles["spans"], angles["inter_pairs"], angles["intra_pairs"]) == (16, 48, 8)
    assert np.shape(angles["cells"]) == (2, 4, 4, 4)
    assert {row["strategy"] for row in coverage["rows"]} == {
        "recent", "phase", "multiscale", "weighted", "diverse", "oracle",
    }  # fmt: skip
    # Tokens are sampled with 46, 78 and 110 fed when the 32nd, 64th and 96th are due.
    assert coverage["events"] == {"24": 3}
    assert [(head["layer"], head["head"]) for head in tsne["heads"]] == [(0, 3), (1, 0)]
    assert all(len(head["points"]) == 24 for head in tsne["heads"])
    assert [event["logical"] for event in timeline["events"]] == [46, 62, 78, 94, 110]
    assert all(sum(event["mean_kept"]) == pytest.approx(30) for event in timeline["events"])
    assert timeline["meta"]["method"] == "agentkv"


@pytest.mark.usefixtures("folder")
def test_a_position_that_never_was_is_not_still_held():
    invoke(*CASES["timeline"], "--out", "trace.npz")
    for asked, last in ((f"4,{TOKENS}", TOKENS), ("1-999999999999", 999_999_999_999)):
        audit = ["analyze", "audit", "--trace", "trace.npz", "--positions", asked]
        refused = str(CliRunner().invoke(kvbench, audit).exception)
        assert f"position {last}: the trace knows positions 0 to {TOKENS - 1}" in refused


@pytest.mark.usefixtures("folder")
def test_a_replay_is_a_trace_to_audit():
    replayed = json.loads(invoke(*CASES["timeline"], "--json", "--out", "trace.safetensors"))
    again = json.loads(invoke("timeline", "--trace", "trace.safetensors", "--json"))
    assert again["events"] == replayed["events"]
    assert again["files"] == ["trace.safetensors"]
    audit = ("audit", "--trace", "trace.safetensors", "--positions", "3-5,119")
    found = json.loads(invoke(*audit, "--json"))["tokens"]
    assert [token["position"] for token in found] == [3, 4, 5, 119]
    for token in found:
        lost = sum(len(eviction["heads"]) for eviction in token["evictions"])
        assert token["held"] + lost == token["heads"] == 4
    assert found[-1]["evictions"] == []
    assert "median rank" in invoke(*audit)


AUDIT = ("audit", "--trace", "in.npz", "--positions")
WRONG = [
    ((*CASES["angles"][:3], "--k", "9"), "k=9: expected 1 to the head dimension, 8"),
    ((*CASES["angles"][:3], "--layer", "2"), "layer 2: the capture has layers 0 to 1"),
    (("angles", "--capture", "bare.npz", "--k", "2"), "angles needs the phase of every token"),
    (("angles", "--capture", "in.npz", "--capture", "bare.npz"), "give captures of one model"),
    ((*CASES["angles"], "--plot", "x.pdf"), "--plot x.pdf: expected a file name that ends in .png"),
    (("coverage", "--capture", "in.npz"), "Missing option '--budget'"),
    (("coverage", "--capture", "in.npz", "--budget", "9%"), "budget '9%': expected a number of"),
    ((*COVERAGE, "--representatives", "6"), "representatives=6: expected a multiple of 4"),
    ((*COVERAGE[:3], "--budget", "500"), "no event at budget 500"),
    ((*CASES["tsne"], "--at", "1"), "--at '1': expected LAYER:HEAD"),
    ((*CASES["tsne"], "--at", "5:0"), "layer 5, head 0: the capture has layers 0 to 1"),
    (("timeline",), "give either --trace FILE, or --capture FILE and --method NAME"),
    (("timeline", "--capture", "in.npz"), "say which method to replay, e.g. --method agentkv"),
    ((*CASES["timeline"], "--trace", "in.npz"), "give either --trace FILE, or --capture FILE"),
    (("timeline", "--trace", "in.npz"), "in.npz: missing array 'logical'; expected a trace"),
    (("timeline", "--capture", "in.npz", "--method", "h2", "--budget", "9"), "did you mean 'h2o'?"),
    ((*CASES["timeline"][:3], "--method", "h2o", "--budget", "200"), "would have had no event"),
    ((*AUDIT, "9-3"), "--positions '9-3': expected positions and ranges"),
    ((*AUDIT, "1-99999999999999999999"), "expected positions and ranges"),
    ((*AUDIT, "1,x"), "--positions 'x': expected positions and ranges"),
    (("audit", "--positions", "3"), "audit needs a trace: add --trace FILE"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_one_line_and_exit_code_two(args, message, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvbench", "analyze", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""
    assert sorted(entry.name for entry in folder.iterdir()) == ["bare.npz", "in.npz"]


@pytest.mark.parametrize(("name", "module"), [("tsne", "sklearn"), ("angles", "matplotlib")])
@pytest.mark.usefixtures("folder")
def test_a_missing_extra_is_named(name, module, monkeypatch, capsys):
    monkeypatch.setattr(
        "agentbench_kv.analysis.tsne.find_spec", lambda found: None if found == module else found
    )
    monkeypatch.setattr(sys, "argv", ["kvbench", "analyze", *CASES[name], "--plot", "x.png"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert 'pip install ".[analysis]"' in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_rings_of_a_run(folder):
    """Played once by `run`, again by `rings`; a method without rings is refused before that."""
    run = ["run", "--task", "micro/recall-1k", "--limit", "1", "--budget", "256", "--quiet"]
    run += ["--method", "agentkv", "--method", "snapkv", "--out", "runs"]
    assert CliRunner().invoke(kvbench, run, catch_exceptions=False).exit_code == 0
    agentkv, snapkv = sorted(path.name for path in (folder / "runs").glob("micro_*"))
    found = json.loads(invoke("rings", "--run", agentkv, "--json"))
    summary = json.loads((folder / "runs" / agentkv / "summary.json").read_text())
    assert (found["sessions"], found["events"]) == (1, summary["kv"]["events"])
    assert (found["window"], found["run"]) == (32, agentkv)
    assert [ring["phase"] for ring in found["reach"]] == ["think", "act", "tool", "others", "all"]
    assert 0.25 <= found["reach"][-1]["inside"]["point"] <= 1
    table = invoke("rings", "--run", agentkv, "--window", "100000")
    assert "% in the last 100000" in table
    assert table.count("100.0") >= 5
    refused = CliRunner().invoke(kvbench, ["analyze", "rings", "--run", snapkv])
    assert "snapkv keeps no ring of queries per phase" in str(refused.exception)
