"""The CPU kernels run on PyTorch's OpenMP team."""

from __future__ import annotations

import ctypes

import pytest
import torch

from agentbench_kv.kernels import build


def test_the_team_function_runs_work_on_as_many_threads_as_asked():
    address = build.team_function()
    if address is None:
        pytest.skip("this PyTorch runs on no OpenMP runtime with GOMP_parallel")
    work_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    team = ctypes.CFUNCTYPE(None, work_type, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(address)
    calls = []
    team(work_type(calls.append), None, 2, 0)
    assert len(calls) == 2


def test_the_runtime_is_the_one_pytorch_loaded():
    loaded = build._loaded_runtimes()
    if "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("this PyTorch was built without OpenMP")
    assert loaded
    assert "torch" in loaded[0]


def test_without_a_runtime_there_is_no_team(monkeypatch):
    monkeypatch.setattr(build, "_loaded_runtimes", lambda: ["/no/such/libgomp.so.1"])
    assert build.team_function() is None
