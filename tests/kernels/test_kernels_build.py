"""Building on first use: names, reuse, and everything that goes wrong with compilers and caches.

Most builds are made by a script in the compiler's place that copies a library built before; the
real compiler runs once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from agentbench_kv import kernels
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.kernels import build, dispatch

WAIT_S = 60


@pytest.fixture(autouse=True)
def backend(monkeypatch, tmp_path):
    """A process that has used no kernels yet, an empty cache, and no choice of the user's."""
    for name in ("KVBENCH_KERNELS", "KVBENCH_KERNEL_FLAGS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVBENCH_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "_loaded", {})
    monkeypatch.setattr(dispatch, "_chosen", [])


@pytest.fixture(scope="session")
def prebuilt():
    """A library of this machine, from the user's cache."""
    try:
        return build.library("cpu")
    except PrerequisiteError as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, prebuilt, monkeypatch):
    """Return a function that sets CXX to a script, which does some things and then copies."""

    def write(before="", after="", name="fake-g++"):
        script = tmp_path / name
        script.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && { echo fake 1.0; exit 0; }\n'
            f"echo run >> {tmp_path}/runs\n{before}\n"
            'while [ "$1" != -o ]; do shift; done\n'
            f'cp {prebuilt} "$2"\n{after}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return write


def runs(tmp_path):
    """How often the script was asked to compile."""
    noted = tmp_path / "runs"
    return len(noted.read_text().split()) if noted.exists() else 0


def works():
    """Whether an operation gives the right answer, whoever computes it."""
    scores = torch.tensor([3.0, 1.0, 2.0, 5.0])
    return kernels.select_top(scores, 2).tolist() == [0, 3]


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def python(code, **environment):
    """Start a process of its own group."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# ---- names and reuse ----


def test_a_second_use_compiles_nothing(compiler, cache, tmp_path):
    compiler()
    first = build.library("cpu")
    assert first.parent == cache
    assert build.library("cpu") == first
    assert runs(tmp_path) == 1
    assert [each.name for each in cache.iterdir()] == [first.name]


def test_flags_compiler_and_version_give_other_names(compiler, monkeypatch):
    compiler()
    names = {build.toolchain("cpu").key}
    assert build.toolchain("cpu").key in names
    monkeypatch.setenv("KVBENCH_KERNEL_FLAGS", "-O1 -g")
    names.add(build.toolchain("cpu").key)
    assert build.toolchain("cpu").command[-3:-1] == ("-O1", "-g")
    compiler(name="other-g++")
    names.add(build.toolchain("cpu").key)
    monkeypatch.setattr(build, "_version", lambda _: "fake 2.0")
    names.add(build.toolchain("cpu").key)
    monkeypatch.setattr(build, "_processor", lambda: "another processor")
    names.add(build.toolchain("cpu").key)
    assert len(names) == 5


def test_every_byte_and_name_of_the_sources_gives_another_name(compiler, tmp_path, monkeypatch):
    compiler()
    copied = Path(shutil.copytree(build.SOURCES, tmp_path / "csrc"))
    monkeypatch.setattr(build, "SOURCES", copied)
    before = build.toolchain("cpu").key
    for path in sorted(copied.iterdir()):
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        assert build.toolchain("cpu").key != before
        path.write_bytes(text)
        assert build.toolchain("cpu").key == before
    (copied / "rows.h").rename(copied / "rows2.h")
    assert build.toolchain("cpu").key != before


@pytest.mark.slow
def test_the_real_compiler_builds_into_an_empty_cache(cache, monkeypatch):
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setenv("KVBENCH_KERNEL_FLAGS", "-O0")
    kernels.use_backend("cpu")
    assert works()
    assert kernels.describe_backend().startswith("cpu (")
    assert [each.suffix for each in cache.iterdir()] == [".so"]


# ---- compilers that do not work ----

COMPLAINS = "echo 'x.h:1: warning: odd' >&2; echo 'x.h:2: error: bad' >&2; echo end >&2; exit 1"


@pytest.fixture(params=["/bin/false", "no-such-compiler", "complains", "writes nothing"])
def broken(request, compiler, monkeypatch):
    """CXX is a compiler that fails in one of the ways they fail; what it must be said to do."""
    if request.param == "complains":
        compiler(before=COMPLAINS)
        return "could not compile the cpu kernels (exit 1): x.h:2: error: bad"
    if request.param == "writes nothing":
        compiler(before="exit 0")
        return "could not compile the cpu kernels (exit 0)"
    monkeypatch.setenv("CXX", request.param)
    return "could not compile" if request.param == "/bin/false" else "no-such-compiler"


def test_a_broken_compiler_is_one_warning_and_then_pytorch(broken, caplog, cache):
    assert works()
    assert works()
    (said,) = warnings(caplog)
    assert "no compiled cpu kernels, using PyTorch's operations instead" in said
    assert broken in said
    assert "\n" not in said
    assert kernels.active_backend().name == "torch"
    assert broken in kernels.describe_backend()
    assert not cache.exists() or not list(cache.iterdir())


def test_a_broken_compiler_is_an_error_if_asked_for_by_name(broken, caplog):
    with pytest.raises(PrerequisiteError) as caught:
        kernels.use_backend("cpu")
    assert broken in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not warnings(caplog)


def test_no_compiler_at_all(monkeypatch, caplog):
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(PrerequisiteError, match=r"no C\+\+ compiler.*install g\+\+"):
        kernels.use_backend("cpu")
    assert works()
    assert len(warnings(caplog)) == 1


def test_a_compiler_that_hangs_is_ended(compiler, monkeypatch):
    compiler(before="exec sleep 30")
    monkeypatch.setattr(build, "TIMEOUT_S", 0.3)
    with pytest.raises(PrerequisiteError, match="timed out"):
        kernels.use_backend("cpu")


def test_the_variable_chooses_and_is_checked(monkeypatch):
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    assert kernels.describe_backend() == "torch (PyTorch operations)"
    monkeypatch.setattr(dispatch, "_chosen", [])
    monkeypatch.setenv("KVBENCH_KERNELS", "fast")
    with pytest.raises(UsageError, match="'fast'; expected one of auto, torch, cpu, cuda"):
        works()


def test_cuda_by_name_is_an_error_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PrerequisiteError, match="PyTorch sees no CUDA device"):
        kernels.use_backend("cuda")


# ---- the command line ----


@pytest.fixture
def capture(tmp_path):
    """A file that `kvbench select` scores in no time."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, 2, 30, 8)).astype(np.float16) for name in "qkv"}
    phase = rng.integers(0, 4, 30)
    np.savez(tmp_path / "in.npz", meta=json.dumps({"model": "m"}), phase=phase, **arrays)
    return tmp_path / "in.npz"


def kvbench_select(capture, **environment):
    line = ["kvbench", "select", "--method", "rkv@code", "--budget", "9"]
    line += ["--capture", str(capture), "--out", str(capture.with_name("out.npz"))]
    code = f"import sys; sys.argv = {line!r}; from agentbench_kv.cli import main; main()"
    process = python(code, **environment)
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err.strip().splitlines()


@pytest.mark.slow
def test_the_command_line_ends_with_one_line_if_the_library_was_asked_for(capture):
    code, _, err = kvbench_select(capture, KVBENCH_KERNELS="cpu", CXX="/bin/false")
    assert code == 2
    assert len(err) == 1
    assert err[0].startswith("kvbench: false could not compile the cpu kernels")


@pytest.mark.slow
def test_the_command_line_falls_back_with_one_line(capture):
    code, out, err = kvbench_select(capture, CXX="/bin/false")
    assert code == 0
    assert "keeps 9 of 30 tokens" in out
    assert len(err) == 1
    assert "using PyTorch's operations instead" in err[0]


@pytest.mark.slow
def test_the_command_line_refuses_an_unknown_choice(capture):
    code, _, err = kvbench_select(capture, KVBENCH_KERNELS="fast")
    assert code == 2
    assert len(err) == 1
    assert "'fast'" in err[0]


# ---- caches that do not work ----


@pytest.fixture
def unwritable(tmp_path, monkeypatch):
    """A cache that is no folder; return that of temporary files."""
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("KVBENCH_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    return tmp_path / "temporary"


def test_an_unwritable_cache_is_said_once_and_the_kernels_are_kept_elsewhere(
    compiler, tmp_path, monkeypatch, caplog, unwritable
):
    compiler()
    for _ in range(3):
        monkeypatch.setattr(dispatch, "_loaded", {})  # as in a new process
        assert works()
        assert kernels.active_backend().name == "cpu"
    (said,) = warnings(caplog)
    assert "cannot write the kernel cache" in said
    assert "KVBENCH_KERNEL_CACHE" in said
    assert runs(tmp_path) == 1
    left = [path for path in unwritable.rglob("*") if path.is_file()]
    assert [each.suffix for each in left] == [".so"]
    assert left[0].parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("spoil", ["open to all", "a link", "a file"])
def test_a_temporary_folder_that_others_can_write_is_not_used(
    spoil, compiler, tmp_path, caplog, unwritable, prebuilt
):
    compiler()
    own = build.own_folder()
    assert own.parent == unwritable
    if spoil == "a file":
        own.write_text("")
    elif spoil == "a link":
        (tmp_path / "trap").mkdir()
        own.symlink_to(tmp_path / "trap")
    else:
        own.mkdir()
        own.chmod(0o777)
        shutil.copy(
            prebuilt, own / f"kvb-cpu-{build.toolchain('cpu').key}-{prebuilt.stem[-16:]}.so"
        )
    assert works()
    assert kernels.active_backend().name == "torch"
    assert "either" in warnings(caplog)[-1]


def garbage(path, _prebuilt):
    path.write_bytes(b"garbage" * 1000)


def empty(path, _prebuilt):
    path.write_bytes(b"")


def half(path, prebuilt):
    """What loads, and kills the process with SIGBUS."""
    whole = prebuilt.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def foreign(path, _prebuilt):
    """A library of something else."""
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))))
    command = [compiler, "-shared", "-x", "c++", "/dev/null", "-o", str(path)]
    subprocess.run(command, check=True)


def flipped(path, prebuilt):
    """What loads, and may compute anything."""
    whole = bytearray(prebuilt.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)


@pytest.mark.parametrize("spoil", [garbage, empty, half, foreign, flipped])
def test_a_spoilt_library_is_built_again(spoil, compiler, cache, prebuilt, caplog, tmp_path):
    compiler()
    path = build.library("cpu")
    spoil(path, prebuilt)
    with caplog.at_level(logging.INFO, "agentbench_kv"):
        assert works()
    assert [r.getMessage() for r in caplog.records] == [
        f"kvbench: {path} was damaged and is compiled again"
    ]
    assert kernels.active_backend().name == "cpu"
    assert runs(tmp_path) == 2
    assert path.read_bytes() == prebuilt.read_bytes()
    assert list(cache.iterdir()) == [path]


def test_a_spoilt_library_that_cannot_be_replaced_falls_back(compiler, prebuilt, caplog):
    compiler()
    path = build.library("cpu")
    garbage(path, prebuilt)
    compiler(before=COMPLAINS)
    assert works()
    assert kernels.active_backend().name == "torch"
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("variable", ["CXX", "KVBENCH_KERNEL_FLAGS"])
def test_an_open_quotation_is_one_line(variable, compiler, monkeypatch):
    compiler()
    monkeypatch.setenv(variable, 'g++ "')
    with pytest.raises(PrerequisiteError, match=f'{variable}=g.. ": No closing quotation; write'):
        kernels.use_backend("cpu")


def test_folders_of_dead_builds_are_swept_and_those_of_living_ones_stay(compiler, cache):
    compiler()
    old, new = cache / ".build-old", cache / ".build-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "part.o").write_text("")
    long_ago = time.time() - build.STALE_S - 60
    os.utime(old, (long_ago, long_ago))
    build.library("cpu")
    assert not old.exists()
    assert new.exists()


def test_a_folder_that_goes_while_the_cache_is_swept_is_no_failure(compiler, cache, caplog):
    compiler()
    cache.mkdir()
    (cache / ".build-gone").symlink_to(cache / "nowhere")
    assert build.library("cpu").parent == cache
    assert not warnings(caplog)


def test_a_failed_build_leaves_nothing_and_the_next_one_works(compiler, cache):
    compiler(after="exit 1")
    with pytest.raises(PrerequisiteError):
        build.library("cpu")
    assert not list(cache.iterdir())
    compiler(name="mended-g++")
    kernels.use_backend("cpu")
    assert works()


# ---- several processes ----

BUILD = """
import torch
from agentbench_kv import kernels
kernels.use_backend("cpu")
print(kernels.select_top(torch.tensor([3.0, 1.0, 2.0, 5.0]), 2).tolist())
"""


def wait_for(path):
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not appear"
        time.sleep(0.02)


@pytest.mark.slow
def test_two_processes_build_at_once(compiler, cache, tmp_path):
    """The script goes on when both processes have started it, so that both are building."""
    compiler(before=f"while [ $(wc -l < {tmp_path}/runs) -lt 2 ]; do sleep 0.05; done")
    both = [python(BUILD) for _ in range(2)]
    said = [process.communicate(timeout=WAIT_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said == [("[0, 3]\n", "")] * 2
    assert runs(tmp_path) == 2
    (left,) = cache.iterdir()
    assert left.suffix == ".so"


@pytest.mark.slow
def test_a_build_killed_half_way_does_no_harm(compiler, cache, tmp_path):
    """It dies after part of the library was written; the next process builds it anew."""
    started = tmp_path / "started"
    script = compiler(after=f'echo part > "$2"; touch {started}; sleep 60')
    process = python(BUILD)
    wait_for(started)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".build-")
    compiler(name=script.name)
    kernels.use_backend("cpu")
    assert works()
    assert [each.suffix for each in sorted(cache.iterdir())] == ["", ".so"]


def test_a_build_that_takes_its_time_says_so(monkeypatch):
    monkeypatch.setattr(build, "PATIENCE_S", 0.0)
    said = threading.Event()
    monkeypatch.setattr(build.logger, "info", lambda *_: said.set())
    with build._note_if_slow("cpu kernels"):
        assert said.wait(10)


def test_a_quick_build_says_nothing(monkeypatch):
    monkeypatch.setattr(build, "PATIENCE_S", 30.0)
    said = []
    monkeypatch.setattr(build.logger, "info", lambda *arguments: said.append(arguments))
    with build._note_if_slow("cpu kernels"):
        pass
    assert not said
