"""The timeline: its figures by hand, its bars by counting, its picture by its pixels."""

from __future__ import annotations

import builtins
import io

import pytest
from rich.console import Console

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results import timeline
from agentbench_kv.results.records import TurnRecord
from agentbench_kv.results.timeline import TimelineStep, draw_timeline, steps, timeline_table


def turn(index: int, live: int, evicted: int = 0, sample: str = "s", events: int = 0) -> TurnRecord:
    return TurnRecord(
        sample_id=sample, trial=0, turn=index, live_after=live, evicted=evicted, events=events
    )


def text_of(table) -> list[str]:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


def test_steps_are_medians_and_deciles_over_trials():
    turns = [turn(1, live, 10 * i, f"s{i}", 1) for i, live in enumerate(range(100, 211, 10))]
    first, second = steps([*turns, turn(0, 7)])
    assert first == TimelineStep(turn=0, trials=1, held=7, low=7, high=7, evicted=0, events=0)
    assert (second.turn, second.trials, second.held, second.evicted) == (1, 12, 155, 55)
    # Of 100, 110, ..., 210: a tenth of the way is 1.1 steps from either end.
    assert (second.low, second.high) == (pytest.approx(111), pytest.approx(199))
    assert second.events == 12
    assert steps([]) == []


def test_bars_are_in_proportion_and_the_budget_is_marked():
    lines = text_of(timeline_table(steps([turn(0, 24), turn(1, 12, 36)]), budget=12))
    assert lines[0].split()[0] == "turn"
    assert (lines[1].count("█"), lines[1].count("░")) == (24, 0)
    assert (lines[2].count("█"), lines[2].count("░")) == (12, 36)
    assert lines[1].split()[-2:] == ["24", "0"]
    last_held = lines[2].rindex("█")
    assert lines[3].index("▲") == last_held
    assert "▲ budget 12" in lines[3]


def test_nothing_held_is_an_empty_bar():
    lines = text_of(timeline_table(steps([turn(0, 0)])))
    assert lines[1].split() == ["0", "0", "0"]


def test_a_long_session_is_cut_and_says_so():
    lines = text_of(timeline_table(steps([turn(i, 5) for i in range(75)])))
    assert lines[-1].split() == ["and", "15", "more", "turns;", "--png", "draws", "all"]


def test_the_picture_shows_what_was_held_and_evicted(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "timeline.png"

    def red_share(evicted: int) -> float:
        draw_timeline(steps([turn(0, 100), turn(1, 50, evicted)]), path, "$x$ [b] \u4e2d\n\x1b", 50)
        pixels = image.imread(path)[..., :3]
        return float(((pixels[..., 0] > 0.8) & (pixels[..., 1] < 0.75)).mean())

    assert red_share(50) > red_share(0) + 0.05
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_turns_is_an_empty_picture(tmp_path):
    pytest.importorskip("matplotlib")
    draw_timeline([], tmp_path / "x.png", "nothing")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "find_spec", lambda _name: None)
    with pytest.raises(PrerequisiteError, match=r'pip install "\.\[analysis\]"'):
        draw_timeline([], tmp_path / "x.png", "title")


def test_matplotlib_is_imported_only_to_draw(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        assert not name.startswith("matplotlib")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert text_of(timeline_table(steps([turn(0, 5)])))


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(PrerequisiteError, match="cannot write"):
        draw_timeline(steps([turn(0, 5)]), tmp_path / "none" / "x.png", "title")


def test_held_tokens_stand_in_megabytes_where_their_bytes_are_known():
    lines = text_of(timeline_table(steps([turn(0, 2000, 10)]), token_bytes=1500.0))
    assert lines[1].split()[-3:] == ["3", "2000", "10"]


def test_the_pictures_axis_is_in_bytes_where_they_are_known(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    for size in (None, 2e6):
        draw_timeline(steps([turn(0, 100)]), tmp_path / "x.png", "title", None, size)
    plain, sized = (each.axes[0] for each in drawn)
    assert plain.get_ylabel() == "live tokens per layer and KV head"
    assert sized.get_ylabel() == "live MB of a session"
    assert sized.yaxis.get_major_formatter()(50, None) == "100"
    assert sized.child_axes[0].get_ylabel() == plain.get_ylabel()
