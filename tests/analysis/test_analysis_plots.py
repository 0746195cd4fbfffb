"""Pictures: of every analysis, in both formats, the same bytes for the same figures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from agentbench_kv.analysis import plots, tsne
from agentbench_kv.analysis.angles import phase_angles
from agentbench_kv.analysis.audit import trace_timeline
from agentbench_kv.analysis.coverage import utility_coverage
from agentbench_kv.analysis.replay import replay_trace
from agentbench_kv.analysis.tsne import embed_queries
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.registry import make_method


@pytest.fixture(scope="module")
def drawings(capture):
    """Functions that draw, by name, with texts the picture must hold."""
    made = capture(120, layers=2, runs=12)
    method = make_method("agentkv", 30, {"interval": 16})
    angles = phase_angles([made], 2)
    coverage = utility_coverage([made], [20, 30], representatives=8, recent=(8,), interval=32)
    timeline = trace_timeline(replay_trace(made, method))
    embeddings = embed_queries(made, [(0, 1), (1, 3)], per_phase=5)
    return {
        "angles": (lambda path: plots.plot_angles(angles, path), ["think", "query head, 4x4"]),
        "coverage": (lambda path: plots.plot_coverage(coverage, path), ["oracle", "phase (q=8)"]),
        "timeline": (
            lambda path: plots.plot_timeline(timeline, path),
            ["tokens ever seen", "tool"],
        ),
        "tsne": (lambda path: plots.plot_tsne(embeddings, path), ["layer 1, query head 3", "act"]),
    }


@pytest.mark.parametrize("name", ["angles", "coverage", "timeline", "tsne"])
def test_both_formats(drawings, tmp_path, name):
    draw, texts = drawings[name]
    draw(tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for file in ("x.svg", "again.svg"):
        draw(tmp_path / file)
    drawn = (tmp_path / "x.svg").read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    # Text is drawn as paths; what it says stands in comments.
    for text in texts:
        assert f"<!-- {text}" in drawn
    assert drawn == (tmp_path / "again.svg").read_text()


def test_the_grid_puts_every_matrix_in_its_place():
    cells = torch.arange(2 * 3 * 16).double().reshape(2, 3, 4, 4)
    tiled = plots._tiled(cells)
    assert tiled.shape == (2 * 5 - 1, 3 * 5 - 1)
    assert torch.equal(tiled[5:9, 10:14], cells[1, 2])
    assert tiled[4].isnan().all()
    assert tiled[:, 9].isnan().all()


def test_what_cannot_be_drawn_is_said_first(tmp_path, monkeypatch):
    plots.check_plot(None)
    plots.check_plot(tmp_path / "x.svg")
    with pytest.raises(UsageError, match=r"x.pdf: expected a file name that ends in .png or .svg"):
        plots.check_plot(tmp_path / "x.pdf")
    monkeypatch.setattr(tsne, "find_spec", lambda _: None)
    with pytest.raises(PrerequisiteError, match=r"plots need matplotlib, .*\[analysis\]"):
        plots.check_plot(tmp_path / "x.svg")


def test_a_place_that_cannot_be_written(drawings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrerequisiteError, match="cannot write"):
        drawings["timeline"][0](tmp_path / "file" / "x.png")
