"""The CUDA library compiles where there is nvcc, with or without a GPU."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels import build
from agentbench_kv.kernels.native import _SIGNATURES

NEEDED = {*_SIGNATURES, "kvb_error", "kvb_attention_mass_workspace", "kvb_similarity_workspace"}


@pytest.fixture(autouse=True)
def backend():
    """No operation runs here."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_the_cuda_library_compiles_and_exports_every_operation(architecture, tmp_path):
    try:
        tools = build._nvcc_toolchain((architecture,))
    except PrerequisiteError as error:
        pytest.skip(str(error))
    output = tmp_path / "kvb-cuda.so"
    build._compile(tools.command, output, "CUDA kernels")
    assert exported(output) >= NEEDED
    assert f"sm_{architecture}".encode() in output.read_bytes()
    assert f".target sm_{architecture}" in embedded_ptx(output)


def embedded_ptx(library):
    """The PTX in a library, which a driver compiles for GPUs that are newer than it."""
    if shutil.which("cuobjdump") is None:
        pytest.skip("no cuobjdump on this machine to read the library's PTX")
    command = ["cuobjdump", "--dump-ptx", str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_ptx_is_of_the_newest_architecture(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    monkeypatch.setattr(build, "_version", lambda _: "nvcc")
    command = build._nvcc_toolchain(("100", "90")).command
    assert "-gencode=arch=compute_100,code=compute_100" in command
    assert "-gencode=arch=compute_90,code=sm_90" in command


def exported(library):
    """Names of the functions others may call; read by nm, which needs no CUDA driver."""
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine to list the library's symbols")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True
    )
    lines = [line.split() for line in listed.stdout.splitlines()]
    return {line[-1] for line in lines if line[-2] == "T"}


def test_without_nvcc_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(PrerequisiteError, match="nvcc not found; install the CUDA toolkit"):
        build._nvcc_toolchain(("80",))
