"""The CUDA library compiles where there is nvcc, with or without a GPU."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess

import pytest

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels import build
from agentbench_kv.kernels.native import _SIGNATURES

NEEDED = {*_SIGNATURES, "kvb_error", "kvb_similarity_workspace"}


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
    assert embedded_ptx(output) == {int(architecture)}


def embedded_ptx(library):
    """Architectures whose PTX a library holds, which a driver compiles for GPUs newer than it.

    A fat binary is a header of 16 bytes and entries; each says its kind (1: PTX, 2: machine code),
    the lengths of its header and of what follows it, and further on its architecture.
    """
    data, found = library.read_bytes(), set()
    for match in re.finditer(re.escape(struct.pack("<I", 0xBA55ED50)), data):
        _, _, head, size = struct.unpack_from("<IHHQ", data, match.start())
        at, end = match.start() + head, match.start() + head + size
        while at < end:
            kind, _, head, size = struct.unpack_from("<HHIQ", data, at)
            if kind == 1:
                found.add(struct.unpack_from("<I", data, at + 28)[0])
            at += head + size
    return found


@pytest.mark.slow
def test_ptx_is_embedded_beside_machine_code(tmp_path):
    try:
        command = build._nvcc_toolchain(("80", "90")).command
    except PrerequisiteError as error:
        pytest.skip(str(error))
    source, output = tmp_path / "one.cu", tmp_path / "one.so"
    source.write_text("__global__ void nothing() {}")
    build._compile((*command[:-1], str(source)), output, "a kernel")
    assert embedded_ptx(output) == {90}
    without = [word for word in command[:-1] if "code=compute" not in word]
    build._compile((*without, str(source)), output, "a kernel")
    assert embedded_ptx(output) == set()


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
