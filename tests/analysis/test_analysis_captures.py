"""Capture files: what is written is read back, and what is wrong is said in one line."""

from __future__ import annotations

import pickle
import struct
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from agentbench_kv.analysis import captures
from agentbench_kv.analysis.captures import NAMES, Capture, read_archive, write_archive
from agentbench_kv.analysis.replay import event_points, select_capture
from agentbench_kv.conformance.scenes import made_up_calibration
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.registry import make_method

SUFFIXES = (".npz", ".safetensors")


def write(path, named, meta='{"model": "m"}'):
    if path.suffix == ".npz":
        np.savez(path, meta=np.array(meta), **named)
    else:
        save_file({k: np.atleast_1d(v) for k, v in named.items()}, path, metadata={"meta": meta})
    return path


def statistics(q_heads=4, head_dim=8, layers=None):
    rng = np.random.default_rng(3)
    lead = () if layers is None else (layers,)
    shape = (*lead, q_heads, head_dim // 2)
    named = {name: rng.random(shape, np.float32) for name in NAMES[-4:-1]}
    return {**named, "inv_freq": rng.random(head_dim // 2, np.float32)}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_saved_is_loaded(arrays, tmp_path, suffix, layers, dtype):
    named = arrays(20, layers=layers, dtype=dtype) | statistics(layers=layers)
    named |= {"positions": np.arange(5, 25), "tokens": np.arange(20), "decoded": np.arange(20) > 12}
    named |= {"now": np.array(18)}
    first = Capture.load(write(tmp_path / f"in{suffix}", named))
    first.save(tmp_path / f"again{suffix}")
    again = Capture.load(tmp_path / f"again{suffix}")
    for loaded in (first, again):
        for name in ("q", "k", "v"):
            expected = named[name] if layers else named[name][None]
            assert np.array_equal(getattr(loaded, name).numpy(), expected)
            assert str(getattr(loaded, name).dtype) == f"torch.{dtype}"
        assert loaded.phases.tolist() == named["phase"].tolist()
        assert loaded.positions.tolist() == list(range(5, 25))
        assert loaded.tokens.tolist() == list(range(20))
        assert loaded.decoded.tolist() == named["decoded"].tolist()
        assert (loaded.now, loaded.prompt, loaded.candidates) == (18, 12, 13)
        mean = named["q_mean_real"] + 1j * named["q_mean_imag"]
        assert np.array_equal(loaded.calibration.mean.numpy(), mean if layers else mean[None])
        assert np.array_equal(loaded.calibration.frequencies.numpy(), named["inv_freq"])
        assert loaded.meta == {"model": "m"}
        assert loaded.layered == (layers is not None)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    layers=st.one_of(st.none(), st.integers(1, 3)),
    half=st.booleans(),
    suffix=st.sampled_from(SUFFIXES),
    start=st.integers(0, 5),
)
def test_any_capture_survives_a_round_trip(
    arrays, tmp_path_factory, tokens, kv_heads, group, layers, half, suffix, start
):
    dtype = "float16" if half else "float32"
    heads = {"q_heads": kv_heads * group, "kv_heads": kv_heads}
    named = arrays(tokens, layers=layers, dtype=dtype, head_dim=4, **heads)
    named["positions"] = np.cumsum(np.arange(tokens) + 1) + start
    path = write(tmp_path_factory.mktemp("capture") / f"in{suffix}", named)
    first = Capture.load(path)
    first.save(path)
    again = Capture.load(path)
    for name, tensor in first.arrays().items():
        assert torch.equal(tensor, again.arrays()[name]), name
    assert (again.layers, again.length) == (layers or 1, tokens)
    assert again.now == named["positions"][-1] + 1


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int32"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_any_whole_numbers_will_do(arrays, tmp_path, suffix, dtype):
    named = arrays(20)
    named["tokens"] = np.arange(100, 120).astype(dtype)
    named["phase"] = named["phase"].astype(dtype)
    loaded = Capture.load(write(tmp_path / f"in{suffix}", named))
    assert loaded.tokens.tolist() == list(range(100, 120))
    assert loaded.phases.tolist() == named["phase"].tolist()


def test_positions_and_now_default_to_the_tokens(arrays):
    named = arrays(20)
    capture = Capture.from_arrays({k: torch.as_tensor(named[k]) for k in "qkv"})
    assert capture.positions.tolist() == list(range(20))
    assert (capture.now, capture.prompt, capture.phases) == (20, 0, None)


def test_layers_may_repeat_what_they_share(arrays):
    named = arrays(20, layers=2)
    stacked = {"phase": np.stack([named["phase"]] * 2), "now": np.array([9, 9])}
    stacked["positions"] = np.stack([np.arange(20)] * 2)
    loaded = Capture.from_arrays({k: torch.as_tensor(v) for k, v in (named | stacked).items()})
    assert loaded.phases.tolist() == named["phase"].tolist()
    assert (loaded.now, loaded.positions.tolist()) == (9, list(range(20)))


def test_some_layers_of_a_capture(arrays):
    named = arrays(20, layers=3) | statistics(layers=3)
    whole = Capture.from_arrays({k: torch.as_tensor(v) for k, v in named.items()})
    part = whole.only_layers([2, 0])
    assert np.array_equal(part.v.numpy(), named["v"][[2, 0]])
    assert np.array_equal(part.calibration.abs_mean.numpy(), named["q_abs_mean"][[2, 0]])
    with pytest.raises(UsageError, match="layer 3: the capture has layers 0 to 2"):
        whole.only_layers([3])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_safetensors_are_memory_mapped(arrays, tmp_path):
    path = write(tmp_path / "in.safetensors", arrays(20))
    loaded = Capture.load(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert loaded.length == 20


def changed(**new):
    def change(named):
        for name, value in new.items():
            if value is None:
                del named[name]
            else:
                named[name] = value(named[name]) if callable(value) else value

    return change


def put(index, value):
    def change(array):
        array = array.copy()
        array[index] = value
        return array

    return change


def renamed(old, new):
    def change(named):
        named[new] = named.pop(old)

    return change


WRONG = {
    "missing q": (changed(q=None), "missing array 'q'; expected q, k and v, found k, phase"),
    "missing v": (changed(v=None), "missing array 'v'"),
    "odd names": (renamed("q", "q\n"), r"expected q, k and v, found k, phase, prompt, 'q\\n', v"),
    "near name": (renamed("phase", "phases"), "unknown array 'phases'; did you mean 'phase'?"),
    "dtype": (changed(q=lambda a: a.astype("f8")), "'q' has dtype float64, expected float16 or"),
    "whole q": (changed(q=lambda a: a.astype("i4")), "'q' has dtype int32, expected float16 or"),
    "axes": (changed(q=lambda a: a[0]), r"'q' has shape \[20, 8\], expected \[q_heads, tokens"),
    "k axes": (changed(k=lambda a: a[None]), r"'k' has shape \[1, 2, 20, 8\]"),
    "k tokens": (changed(k=lambda a: a[:, :9]), r"'k' has shape \[2, 9, 8\], expected kv_heads by"),
    "v shape": (changed(v=lambda a: a[:1]), r"'v' has shape \[1, 20, 8\], expected the shape of k"),
    "empty": (changed(q=lambda a: a[:, :0]), r"'q' has shape \[4, 0, 8\], expected at least one"),
    "groups": (changed(q=lambda a: a[:3]), "3 query heads are not a multiple of 2 KV heads"),
    "NaN": (changed(k=put((1, 3, 2), np.nan)), "'k' has 1 NaN or infinite values"),
    "inf": (changed(v=put((0, 0), np.inf)), "'v' has 8 NaN or infinite values"),
    "phase": (changed(phase=put(3, 4)), "phase 4 at token 3; expected 0 to 3"),
    "low phase": (changed(phase=put(0, -1)), "phase -1 at token 0"),
    "phase length": (changed(phase=lambda a: a[1:]), r"'phase' has shape \[19\], expected \[20\]"),
    "phase dtype": (changed(phase=lambda a: a + 0.5), "'phase' has dtype float64, expected whole"),
    "positions": (
        changed(positions=np.r_[0:9, 8, 10:20]),
        "positions are not ascending: 8 at token 9 follows 8",
    ),
    "negative": (
        changed(positions=np.arange(20) - 1),
        "positions -1 at token 0; expected 0 to",
    ),
    "far": (changed(positions=np.r_[0:19, 10**12]), "positions 1000000000000 at token 19"),
    "far now": (changed(now=np.array(10**12)), "now is 1000000000000; expected at least 1, and no"),
    "tokens": (changed(tokens=np.arange(20) - 3), "tokens -3 at token 0"),
    "decoded": (changed(decoded=np.full(20, 2)), "decoded 2 at token 0; expected 0 to 1"),
    "now": (changed(now=np.array(0)), "now is 0; expected at least 1"),
    "now shape": (changed(now=np.array([1, 2])), r"'now' has shape \[2\], expected one number"),
    "now dtype": (changed(now=np.array(1.5)), "'now' has dtype float64, expected a whole number"),
    "prompt": (changed(prompt=np.array(-1)), "prompt is -1; expected at least 0"),
    "statistics": (
        lambda named: named.update(q_mean_real=np.zeros((4, 4), "f4")),
        "missing array 'q_mean_imag': it goes with q_mean_real",
    ),
    "statistics shape": (
        lambda named: named.update(statistics(q_heads=2)),
        r"'q_mean_real' has shape \[1, 2, 4\], expected \[1, 4, 4\]",
    ),
    "statistics NaN": (
        lambda named: named.update(statistics() | {"inv_freq": np.full(4, np.nan, "f4")}),
        "'inv_freq' has 4 NaN or infinite values",
    ),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_array_is_named(arrays, tmp_path, case, suffix):
    change, message = WRONG[case]
    named = arrays(20)
    change(named)
    path = write(tmp_path / f"bad{suffix}", named)
    with pytest.raises(UsageError, match=message) as caught:
        Capture.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_layers_must_agree_on_what_they_share(arrays):
    named = arrays(20, layers=2)
    named["phase"] = np.stack([named["phase"], named["phase"][::-1]])
    with pytest.raises(UsageError, match="'phase' differs between layers"):
        Capture.from_arrays({k: torch.as_tensor(v) for k, v in named.items()})


def unreadable(folder: Path, kind: str) -> Path:
    path = folder / ("x.safetensors" if "safetensors" in kind else "x.npz")
    whole = folder / "whole.npz"
    np.savez(whole, q=np.zeros((2, 50, 4), np.float32))
    if kind == "folder":
        path.mkdir()
    elif kind == "single array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"q": 1}))
    elif kind == "objects":
        np.savez(path, q=np.array([{}, None], dtype=object))
    elif kind == "cut off":
        path.write_bytes(whole.read_bytes()[:-30])
    elif kind == "damaged":
        damaged = bytearray(whole.read_bytes())
        damaged[300] ^= 255
        path.write_bytes(damaged)
    elif kind == "other zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("q.npy", "no array")
    else:
        path.write_bytes(b"" if "empty" in kind else b"plain text, long enough to be a header")
    return path


KINDS = ["folder", "single array", "pickle", "objects", "cut off", "damaged", "other zip"]
KINDS += ["empty", "text", "empty safetensors", "text safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_archive(tmp_path, kind):
    path = unreadable(tmp_path, kind)
    with pytest.raises(UsageError, match=r"x\.(npz|safetensors)") as caught:
        Capture.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_unknown_suffix(tmp_path):
    with pytest.raises(UsageError, match=r"in\.npz does not exist"):
        Capture.load(tmp_path / "in.npz")
    with pytest.raises(UsageError, match=r"expected a file name that ends in \.npz or"):
        Capture.load(tmp_path / "in.pt")


@pytest.mark.parametrize("meta", ["not json", "[1]"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_note_that_is_no_object(arrays, tmp_path, meta, suffix):
    path = write(tmp_path / f"in{suffix}", arrays(20), meta)
    with pytest.raises(UsageError, match="meta is not a JSON object"):
        Capture.load(path)


def npy_header(text: str) -> bytes:
    """The start of an array's file, format 1.0."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def test_an_archive_that_unpacks_to_far_more_is_refused(arrays, tmp_path, monkeypatch):
    """7 MB that unpack to 1.5 GB: by size alone, before any of it is in memory."""
    monkeypatch.setattr(captures, "_UNPACKED", 1 << 20)
    path = tmp_path / "in.npz"
    named = arrays(20) | {"k": np.zeros((2 << 20,), np.float16)}
    np.savez_compressed(path, **named)
    with monkeypatch.context() as patch:
        patch.setattr(np, "load", lambda *_, **__: pytest.fail("it was opened"))
        with pytest.raises(UsageError, match=r"bytes unpack to 4,\d+,\d+; expected at most 20 t"):
            Capture.load(path)
    # What is not asked for is never unpacked.
    np.savez_compressed(path, other=np.zeros((2 << 20,), np.float16), **arrays(20))
    assert Capture.load(path).length == 20
    np.savez(path, **named)
    with pytest.raises(UsageError, match="array 'k' has shape"):
        Capture.load(path)


START = "{'descr': '<f4', 'fortran_order': False, 'shape': "
HEADERS = {
    "terabytes": f"{START}(4000000000000, 8), }}",
    "beyond 64 bits": f"{START}(99999999999999999999999, 8), }}",
    "negative": f"{START}(-1, -8), }}",
    "a fraction": f"{START}(1.5,), }}",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
    "a deep type": "{'descr': '" + "(" * 5000 + "', 'fortran_order': False, 'shape': (3,), }",
    "deep": "(" * 9000,
    "unfinished": "{'descr': '<f4', 'shape': (3,), ",
    "continued": "{'descr': '<f4',\\",
    "null": "\x00",
    "long": "{" * 20000,
    "an open text": "'" * 3,
    "empty": "",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_promises_what_is_not_there(tmp_path, header):
    path = tmp_path / "in.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("q.npy", npy_header(header) + bytes(24))
    with pytest.raises(UsageError, match=r"cannot read .*expected a \.npz file as") as caught:
        Capture.load(path)
    assert "\n" not in str(caught.value)


def test_text_where_numbers_belong(tmp_path):
    np.savez(tmp_path / "in.npz", q=np.array(["a"]))
    with pytest.raises(UsageError, match="array 'q' has dtype <U1, expected numbers"):
        Capture.load(tmp_path / "in.npz")


numbers = st.sampled_from(["float16", "float32", "float64", "int64", "uint8", "bool"])
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
junk = st.dictionaries(st.sampled_from(NAMES), st.tuples(shapes, numbers, st.integers(-2, 5)))


@settings(max_examples=150, deadline=None)
@given(junk=junk, keep=st.booleans())
def test_no_arrays_cause_anything_but_a_usage_error(arrays, junk, keep):
    """Whatever a file holds, a capture comes out or one line that says why not."""
    named = arrays(3, q_heads=2, kv_heads=1, head_dim=2) if keep else {}
    named |= {
        name: np.full(shape, value).astype(dtype) for name, (shape, dtype, value) in junk.items()
    }
    try:
        capture = Capture.from_arrays({name: torch.as_tensor(a) for name, a in named.items()})
    except UsageError:
        return
    assert capture.q.ndim == capture.k.ndim == 4
    assert capture.candidates >= 1
    assert len(capture.positions) == capture.length


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_place_that_cannot_be_written(tmp_path, suffix):
    (tmp_path / "file").write_text("")
    with pytest.raises(KVBenchError, match="cannot write"):
        write_archive(tmp_path / "file" / f"x{suffix}", {"a": torch.zeros(2)}, {})
    with pytest.raises(PrerequisiteError, match="cannot write"):
        write_archive(Path(f"/proc/x{suffix}"), {"a": torch.zeros(2)}, {})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_can_be_shared(tmp_path, suffix):
    """As any new file can, by the umask; safetensors alone would shut everybody else out."""
    (tmp_path / "plain").touch()
    write_archive(tmp_path / f"x{suffix}", {"a": torch.zeros(2)}, {})
    assert (tmp_path / f"x{suffix}").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failed_write_leaves_the_old_file(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"x{suffix}"
    write_archive(path, {"a": torch.zeros(2)}, {"n": 1})

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez", full)
    monkeypatch.setattr("agentbench_kv.analysis.captures.save_file", full)
    with pytest.raises(PrerequisiteError, match="no space left"):
        write_archive(path, {"a": torch.ones(2)}, {"n": 2})
    assert read_archive(path, ["a"]).meta == {"n": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_capture_keeps_covariances_and_the_system_message(tmp_path, suffix):
    made = made_up_calibration(2, 4, torch.ones(4))
    rows = torch.randn(2, 4, 9, 8)
    places = torch.arange(9)
    plain = Capture(rows, rows[:, :2], rows[:, :2], places, 9, 5, 3, calibration=made)
    plain.save(tmp_path / f"one{suffix}")
    found = Capture.load(tmp_path / f"one{suffix}")
    assert (found.prompt, found.system) == (5, 3)
    assert torch.equal(found.calibration.covariance, made.covariance)
    part = found.only_layers([1]).calibration
    assert torch.equal(part.covariance, made.covariance[1:])
    with pytest.raises(UsageError, match=r"'q_covariance' has shape .* q_heads by head_dim by hea"):
        Capture.from_arrays({**found.arrays(), "q_covariance": torch.ones(2, 4, 8, 4)})
    arrays = {name: each for name, each in found.arrays().items() if name != "q_mean_real"}
    with pytest.raises(UsageError, match="missing array 'q_mean_real'"):
        Capture.from_arrays(arrays)


def test_a_capture_that_does_not_know_its_system_message_protects_none():
    rows = torch.randn(1, 2, 30, 8)
    capture = Capture(rows, rows, rows, torch.arange(30), 30, prompt=12)
    method = make_method("streamingllm@system", 10)
    with pytest.raises(UsageError, match="has no array 'system'"):
        select_capture(capture, method)
    kept = select_capture(replace(capture, system=5), method).kept
    assert kept[0, 0].tolist() == [0, 1, 2, 3, 4, 25, 26, 27, 28, 29]
    full = make_method("streamingllm@prompt", 10)
    with pytest.raises(UsageError, match=r"protected 12 \+ recent 0 >= budget 10"):
        select_capture(capture, full)


def test_an_event_without_room_is_no_point_of_a_replay():
    rows = torch.randn(1, 1, 90, 8)
    capture = Capture(rows, rows, rows, torch.arange(90), 90, prompt=20)
    given = {"interval": 8, "sinks": 0}
    assert event_points(capture, make_method("streamingllm@prompt", 24, given))[:2] == [27, 35]
    assert event_points(capture, make_method("streamingllm@prompt", 20, given)) == []
