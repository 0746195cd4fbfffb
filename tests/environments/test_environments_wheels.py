"""Wheels built from source distributions: once for a processor, with what the build needs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentbench_kv.environments import PROFILES
from agentbench_kv.environments import build as wheels
from agentbench_kv.environments.build import cached_wheel, wheel_of
from agentbench_kv.environments.profiles import BuiltWheel
from agentbench_kv.errors import PrerequisiteError

WANTED = BuiltWheel("some-thing", "1.2", "ab" * 32, {"FLAGS": "-O3"})
NAME = "some_thing-1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))


class Pip:
    """Stands in for pip: writes a wheel where it is told to."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[tuple[list[str], dict[str, str]]] = []
        self._fails = fails

    def __call__(self, command: Sequence[str], settings: Mapping[str, str]) -> None:
        self.calls.append((list(command), dict(settings)))
        if self._fails:
            raise PrerequisiteError("no compiler")
        self.pins = Path(command[command.index("-r") + 1]).read_text()
        self.cmake = {
            name: Path(file).read_text()
            for name, _, file in (
                word.partition("=") for word in shlex.split(settings.get("CMAKE_ARGS", ""))
            )
            if name.endswith("_INCLUDE")
        }
        (Path(command[command.index("--wheel-dir") + 1]) / NAME).write_text("wheel")


def build(pip: Pip, wanted: BuiltWheel = WANTED) -> Path:
    return wheel_of(wanted, Path("python"), pip, lambda _: None)


def test_a_wheel_is_built_once(tmp_path: Path) -> None:
    pip = Pip()
    first = build(pip)
    assert first.name == NAME
    assert first.is_relative_to(tmp_path / "wheels")
    assert build(pip) == first == cached_wheel(WANTED)
    ((command, settings),) = pip.calls
    assert pip.pins == f"some-thing==1.2 --hash=sha256:{WANTED.sha256}\n"
    assert {"--require-hashes", "--no-build-isolation"} <= set(command)
    assert command[command.index("--no-binary") + 1] == "some-thing"
    assert settings == {"FLAGS": "-O3"}
    assert not list(first.parent.glob(".build-*"))


def test_other_settings_or_another_processor_build_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip()
    first = build(pip)
    other = build(pip, replace(WANTED, settings={"FLAGS": "-O2"}))
    monkeypatch.setattr(wheels, "_processor", lambda: "another")
    assert cached_wheel(WANTED) is None
    assert len({first, other, build(pip)}) == 3


def test_a_failed_build_leaves_nothing() -> None:
    with pytest.raises(PrerequisiteError, match="no compiler"):
        build(Pip(fails=True))
    assert cached_wheel(WANTED) is None


def test_a_missing_tool_is_named_before_anything_runs() -> None:
    pip = Pip()
    with pytest.raises(PrerequisiteError, match="no-such-tool"):
        build(pip, replace(WANTED, tools=("no-such-tool",)))
    assert not pip.calls


def test_a_project_begins_with_the_code_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "a home"))
    pip, code = Pip(), {"inner": "set(PART OFF)\n", "other": "set(REST OFF)\n"}
    plain = build(Pip())
    made = build(pip, replace(WANTED, settings={"CMAKE_ARGS": "-DX=1"}, cmake=code))
    ((_, settings),) = pip.calls
    assert settings["CMAKE_ARGS"].startswith("-DX=1 ")
    found = {f"-DCMAKE_PROJECT_{name}_INCLUDE": text for name, text in code.items()}
    assert pip.cmake == found
    again = build(Pip(), replace(WANTED, settings={"CMAKE_ARGS": "-DX=1"}, cmake={"inner": ""}))
    assert len({plain, made, again}) == 3


PROJECTS = {
    "CMakeLists.txt": """
cmake_minimum_required(VERSION 3.21)
project(outer NONE)
set(LLAMA_BUILD_COMMON ON CACHE BOOL "" FORCE)
add_subdirectory(inner)
""",
    "inner/CMakeLists.txt": """
cmake_minimum_required(VERSION 3.14...3.28)
project("llama.cpp" NONE)
foreach(part COMMON TESTS TOOLS EXAMPLES SERVER)
  option(LLAMA_BUILD_${part} "" ON)
  message(STATUS "${part} is ${LLAMA_BUILD_${part}}")
endforeach()
""",
}


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on this machine")
def test_llama_cpp_is_built_without_what_nobody_loads(tmp_path: Path) -> None:
    """Projects that set and read the options as llama-cpp-python and llama.cpp do."""
    for name, text in PROJECTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def pip(command: Sequence[str], settings: Mapping[str, str]) -> None:
        given = shlex.split(settings["CMAKE_ARGS"])
        asked = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build"), *given]
        said.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
        Pip()(command, settings)

    said: list[str] = []
    built = PROFILES["llamacpp"].built
    assert built is not None
    wheel_of(replace(built, tools=("cmake",)), Path("python"), pip, lambda _: None)
    for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER"):
        assert f"{part} is OFF" in said[0]
    assert "-DLLAVA_BUILD=OFF" in built.settings["CMAKE_ARGS"]  # and with it, mtmd


def test_the_pinned_version_and_the_flags_decide_the_folder() -> None:
    profile = PROFILES["llamacpp"]
    assert profile.built is not None
    newer = replace(profile, built=replace(profile.built, version="9.9"))
    assert newer.folder_name() != profile.folder_name()
