"""A run is of one code: edited methods are another run's."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentbench_kv.adapters.base import Outcome
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import make_method
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.store import METHOD_CODE, RunStore
from agentbench_kv.run import provenance, runner
from agentbench_kv.run.provenance import method_code
from agentbench_kv.run.spec import RunSpec

SpecOf = Callable[..., RunSpec]
Edit = Callable[..., None]
BASE = """
from dataclasses import dataclass
from agentbench_kv.methods.full import Full
@dataclass(frozen=True, kw_only=True)
class Base(Full):
    '''Nothing of its own.'''
"""
SOURCE = """
from dataclasses import dataclass
from typing import ClassVar
from edited_base import Base
@dataclass(frozen=True, kw_only=True)
class Edited(Base):
    name: ClassVar[str] = "edited"
"""


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """Return a function that writes method `edited` as a plug-in, as a new process finds it."""
    folder = tmp_path / "plugin"
    info = folder / "edited-0.1.dist-info"
    info.mkdir(parents=True)
    points = "[agentbench_kv.methods]\nedited = edited_method:Edited\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(folder))

    def forget() -> None:
        for name in ("edited_method", "edited_base"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    def write(more: str = "", base: str = "", version: str = "0.1") -> None:
        (folder / "edited_method.py").write_text(SOURCE + more)
        (folder / "edited_base.py").write_text(BASE + base)
        about = f"Metadata-Version: 2.1\nName: edited\nVersion: {version}\n"
        (info / "METADATA").write_text(about)
        forget()

    write()
    yield write
    forget()


def quiet(*_: Any) -> None:
    """Report no progress."""


def half(sample: str, *_: Any) -> Outcome:
    """Play a trial that is right, or lost in the sample that comes last."""
    if sample == "x-1":
        return Outcome(TrialStatus.INFRA_ERROR)
    return Outcome(TrialStatus.SCORED, score=1.0)


def right(*_: Any) -> Outcome:
    return Outcome(TrialStatus.SCORED, score=1.0)


def lost(*_: Any) -> Outcome:
    return Outcome(TrialStatus.INFRA_ERROR)


@pytest.mark.parametrize("behave", [half, right], ids=["half", "finished"])
@pytest.mark.parametrize(
    "change", [{"more": "    # edited\n"}, {"base": "    # edited\n"}, {"version": "0.2"}]
)
def test_a_run_of_edited_code_is_refused(
    told: Callable[..., Any],
    spec: SpecOf,
    edit: Edit,
    tmp_path: Path,
    behave: Callable[..., Outcome],
    change: dict[str, str],
) -> None:
    """A finished run gave the old figures, an interrupted one was half of either code."""
    told(behave, ids=("x-0", "x-1"))
    runner.run_one(spec(method="edited"), tmp_path, quiet)
    record = tmp_path / spec(method="edited").id / "run.json"
    before = record.read_bytes()
    noted = json.loads(before)["provenance"][METHOD_CODE]
    assert re.fullmatch("[0-9a-f]{16} edited 0.1", noted)

    edit(**change)
    name = record.parent.name
    said = f"^the code of method edited changed since run {name} began; choose another --out$"
    with pytest.raises(UsageError, match=said):
        runner.run_one(spec(method="edited"), tmp_path, quiet)
    assert record.read_bytes() == before

    edit()  # as it was
    told(right, ids=("x-0", "x-1"))
    assert runner.run_one(spec(method="edited"), tmp_path, quiet).notes == []


def test_a_run_without_a_finished_trial_is_of_the_code_that_finishes_one(
    told: Callable[..., Any], spec: SpecOf, edit: Edit, tmp_path: Path
) -> None:
    told(lost, ids=("x-0", "x-1"))
    runner.run_one(spec(method="edited"), tmp_path, quiet)
    edit("    # mended\n")
    told(right, ids=("x-0", "x-1"))
    one = spec(method="edited")
    assert runner.run_one(one, tmp_path, quiet).notes == []
    info = RunStore(tmp_path).find(one.id).info
    assert info.provenance[METHOD_CODE] == method_code(one.built_method)[METHOD_CODE]


def test_a_run_of_an_earlier_version_goes_on_with_one_code(
    told: Callable[..., Any], spec: SpecOf, edit: Edit, tmp_path: Path
) -> None:
    """It did not note which its first trials had, but what it goes on with is noted."""
    ids = ("x-0", "x-1", "x-2")
    told(lambda name, *_: lost() if name == "x-2" else half(name), ids=ids)
    one = spec(method="edited")
    runner.run_one(one, tmp_path, quiet)
    record = tmp_path / one.id / "run.json"
    document = json.loads(record.read_bytes())
    noted = document["provenance"].pop(METHOD_CODE)
    record.write_text(json.dumps(document))
    told(half, ids=ids)
    runner.run_one(one, tmp_path, quiet)
    assert RunStore(tmp_path).find(one.id).info.resumes[-1].changed == {METHOD_CODE: (None, noted)}
    edit("    # edited\n")
    with pytest.raises(UsageError, match="the code of method edited changed"):
        runner.run_one(spec(method="edited"), tmp_path, quiet)


def test_a_builtin_method_is_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files of the package are `code_sha`'s, which is only noted."""
    asked: list[str] = []
    read = Path.read_bytes

    def watch(path: Path) -> bytes:
        asked.append(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", watch)
    provenance._method_code.cache_clear()
    codes = [method_code(make_method(name, 256)) for name in ("agentkv", "snapkv", "agentkv@paper")]
    assert asked == ["agentkv.py", "snapkv.py"]
    assert codes[0] == codes[2] != codes[1]
    assert all(re.fullmatch("[0-9a-f]{16}", code[METHOD_CODE]) for code in codes)


def test_code_that_no_file_holds_is_not_known(edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    edit()
    typed = ModuleType("typed_in")
    monkeypatch.setitem(sys.modules, typed.__name__, typed)
    exec(SOURCE, vars(typed))
    assert method_code(typed.Edited()) == {}
