"""`kvbench select`: the file format, and one line for whatever is wrong."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open

from agentbench_kv import __version__
from agentbench_kv.cli import kvbench, main

TOKENS = 80


@pytest.fixture
def named():
    """The arrays of a capture: two layers of 4 query and 2 KV heads."""
    rng = np.random.default_rng(0)
    statistics = {
        name: rng.random((2, 4, 4), np.float32) for name in ("q_mean_real", "q_mean_imag")
    }
    return {
        "q": rng.standard_normal((2, 4, TOKENS, 8)).astype(np.float16),
        "k": rng.standard_normal((2, 2, TOKENS, 8)).astype(np.float16),
        "v": rng.standard_normal((2, 2, TOKENS, 8)).astype(np.float16),
        "phase": rng.integers(0, 4, TOKENS),
        **statistics,
        "q_abs_mean": 2 + rng.random((2, 4, 4), np.float32),
        "inv_freq": 10.0 ** -np.arange(4, dtype=np.float32),
    }


@pytest.fixture
def folder(named, tmp_path, monkeypatch):
    """A folder with `in.npz`, to run in."""
    monkeypatch.chdir(tmp_path)
    for name in [key for key in os.environ if key.startswith("KVBENCH_")]:
        monkeypatch.delenv(name)
    np.savez("in.npz", meta=json.dumps({"model": "m"}), **named)
    return tmp_path


def select(*args, method="rkv@code", budget="20", capture="in.npz", out="out.npz"):
    line = ["--method", method, "--capture", capture, "--out", out, *args]
    return ["select", *line, *(["--budget", budget] if budget else [])]


METHODS = ["agentkv", "agentkv@paper", "h2o", "random", "rkv@code", "streamingllm", "triattention"]


@pytest.mark.parametrize("method", [*METHODS, "rkv@serving"])
@pytest.mark.usefixtures("folder")
def test_what_is_written(method):
    done = CliRunner().invoke(kvbench, select(method=method), catch_exceptions=False)
    assert done.exit_code == 0
    assert f"{method} keeps 20 of 80 tokens in each of 2 x 2 (layer, head)s: out.npz" in done.output
    with np.load("out.npz", allow_pickle=False) as out:
        kept, score = out["kept"], out["score"]
        meta = json.loads(str(out["meta"]))
        assert sorted(out.files) == ["kept", "meta", "score"]
    assert (kept.shape, str(kept.dtype)) == ((2, 2, 20), "int32")
    assert (score.shape, str(score.dtype)) == ((2, 2, TOKENS), "float32")
    assert (np.diff(kept) > 0).all()
    always = np.isnan(score)
    assert all(
        set(np.flatnonzero(a)) <= set(k)
        for a, k in zip(always.reshape(4, -1), kept.reshape(4, -1), strict=True)
    )
    name, _, preset = method.partition("@")
    assert meta["method"] == name
    assert preset in ("", meta["preset"])
    assert (meta["budget"], meta["T"], meta["layers"]) == (20, TOKENS, 2)
    assert (meta["version"], meta["capture"]) == (__version__, {"model": "m"})


@pytest.mark.usefixtures("folder")
def test_a_single_layer_has_no_layer_axis(named):
    shared = ("phase", "inv_freq")
    np.savez("one.npz", **{name: a if name in shared else a[0] for name, a in named.items()})
    runner = CliRunner()
    runner.invoke(kvbench, select(capture="one.npz"), catch_exceptions=False)
    runner.invoke(kvbench, select(out="both.npz"), catch_exceptions=False)
    with np.load("out.npz") as one, np.load("both.npz") as both:
        assert one["kept"].shape == (2, 20)
        assert np.array_equal(one["kept"], both["kept"][0])
        assert np.array_equal(one["score"], both["score"][0], equal_nan=True)


@pytest.mark.usefixtures("folder")
def test_safetensors_hold_the_same():
    runner = CliRunner()
    runner.invoke(kvbench, select(), catch_exceptions=False)
    done = runner.invoke(
        kvbench, select("--json", out="deep/out.safetensors"), catch_exceptions=False
    )
    with safe_open("deep/out.safetensors", "np") as file, np.load("out.npz") as plain:
        assert np.array_equal(file.get_tensor("kept"), plain["kept"])
        assert np.array_equal(file.get_tensor("score"), plain["score"], equal_nan=True)
        meta = json.loads(file.metadata()["meta"])
    assert json.loads(done.output) == {**meta, "out": "deep/out.safetensors"}


@pytest.mark.usefixtures("folder")
def test_budgets_settings_and_now():
    args = select("--now", "60", "--set", "window=5", "--json", budget="25%")
    meta = json.loads(CliRunner().invoke(kvbench, args, catch_exceptions=False).output)
    assert (meta["budget"], meta["budget_share"], meta["now"]) == (15, 0.25, 60)
    assert (meta["candidates"], meta["settings"]["window"]) == (60, 5)
    with np.load("out.npz") as out:
        assert out["kept"].max() < 60
        assert np.isneginf(out["score"][..., 60:]).all()
        assert np.isnan(out["score"][..., 55:60]).all()


@pytest.mark.usefixtures("folder")
def test_environment_twins(monkeypatch):
    twins = {"METHOD": "streamingllm", "BUDGET": "9", "CAPTURE": "in.npz", "SELECT_OUT": "o.npz"}
    for name, value in twins.items():
        monkeypatch.setenv(f"KVBENCH_{name}", value)
    assert CliRunner().invoke(kvbench, ["select"], catch_exceptions=False).exit_code == 0
    with np.load("o.npz") as out:
        assert out["kept"][0, 0].tolist() == [0, 1, 2, 3, 75, 76, 77, 78, 79]


WRONG = [
    (select(method="rvk"), "unknown method 'rvk'; did you mean 'rkv'?"),
    (select(method="rkv@cod"), "unknown rkv preset 'cod'; did you mean 'code'?"),
    (select(method="full", budget=None), "full keeps every token"),
    (select(budget=None), "rkv needs a budget: add --budget"),
    (select(budget="0"), "budget '0': expected a number of tokens >= 1"),
    (select(budget="-4"), "budget '-4': expected a number of tokens >= 1"),
    (select(budget="lots"), "budget 'lots': expected"),
    (select(budget="8"), "budget 8 is not above the 8 tokens rkv@code always keeps"),
    (select(budget="81"), "budget 81 is over the 80 tokens of the capture"),
    (select("--now", "15"), "budget 20 is over the 15 tokens of the capture before position 15"),
    (select("--now", "0"), "now=0: expected a position after the capture's first token"),
    (select("--set", "windw=4"), "unknown rkv parameter 'windw'; did you mean 'window'?"),
    (select("--set", "window"), "--set 'window': expected key=value"),
    (select("--set", "lam=2"), "lam=2: expected a number >= 0 and <= 1"),
    (select(method="oracle"), "oracle needs tokens after the event"),
    (select(capture="no.npz"), "no.npz does not exist"),
    (select(capture="."), ".: expected a file name that ends in .npz or .safetensors"),
    (select(out="out.pt"), "out.pt: expected a file name that ends in .npz or .safetensors"),
    (select(out="./in.npz"), "--out in.npz is the capture itself"),
    (select(out="/proc/x/out.npz"), "cannot write /proc/x/out.npz"),
    (["select", "--method", "rkv", "--out", "o.npz"], "Missing option '--capture'"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_one_line_and_exit_code_two(args, message, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvbench", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""
    assert [entry.name for entry in folder.iterdir()] == ["in.npz"]


def broken(named, case):
    if case == "missing":
        del named["v"]
    elif case == "shapes":
        named["k"] = named["k"][:, :, :-1]
    elif case == "NaN":
        named["k"][1, 0, 3, 2] = np.nan
    elif case == "phases":
        named["phase"][7] = 4
    return named


BROKEN = {
    "missing": "in.npz: missing array 'v'; expected q, k and v",
    "shapes": "in.npz: array 'k' has shape [2, 2, 79, 8]",
    "NaN": "in.npz: array 'k' has 1 NaN or infinite values",
    "phases": "in.npz: phase 4 at token 7; expected 0 to 3",
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.usefixtures("folder")
def test_a_broken_capture_is_one_line(named, case, monkeypatch, capsys):
    np.savez("in.npz", **broken(named, case))
    monkeypatch.setattr(sys, "argv", ["kvbench", *select()])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert BROKEN[case] in printed.err
    assert len(printed.err.strip().splitlines()) == 1
