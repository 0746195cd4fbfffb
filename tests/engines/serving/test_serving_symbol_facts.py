"""What the plug-ins use of vLLM and SGLang is there in every version they take, by written facts.

No engine is needed: `benchmarks/engine_symbols.py` has read their sources. Where one is installed,
`problems()` of its launcher and `find_version` look at the real thing.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import engine_symbols
from engine_symbols import FACTS, TESTED, Source, facts_file, listed, problems, unread, uses, wanted

ALL = [(engine, version) for engine, versions in TESTED.items() for version in versions]
EACH = [pytest.param(*each, id="-".join(each)) for each in ALL]


def facts_of(engine: str, version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(facts_file(engine, version).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(("engine", "version"), EACH)
def test_every_symbol_a_plugin_uses_is_there(engine: str, version: str) -> None:
    words, facts = wanted(engine, version), facts_of(engine, version)
    exact = listed(engine, version) if engine == "sglang" else {}
    assert problems(words, facts, exact) == []
    # What nobody uses any more is no fact worth keeping.
    assert facts.keys() == words.keys()


@pytest.mark.parametrize(("engine", "version"), EACH)
def test_what_the_plugin_calls_an_engines_objects_is_known(engine: str, version: str) -> None:
    """Another name for one of them would take all that is read of it out of what is compared."""
    assert unread(engine, version) == set()


def test_there_are_facts_of_the_versions_that_are_taken_alone() -> None:
    assert {file.stem for file in FACTS.iterdir()} == {"-".join(each) for each in ALL}


@pytest.mark.parametrize(("engine", "version"), EACH)
def test_what_an_engine_lost_is_named(engine: str, version: str) -> None:
    words, facts = wanted(engine, version), facts_of(engine, version)
    asked = {path: kept for path, kept in words.items() if kept}
    for path in (min(asked), max(words)):
        (problem,) = problems(words, {k: v for k, v in facts.items() if k != path}, {})
        assert problem == f"{path} is gone"
    path = max(asked)
    assert problems(words, facts | {path: []}, {}) == [
        f"{path} has no {', '.join(sorted(asked[path]))}"
    ]


def test_a_parameter_more_matters_where_a_function_is_wrapped() -> None:
    exact = {"a.b.c": ("self",)}
    assert problems({"a.b.c": frozenset({"self"})}, {"a.b.c": ["self", "more"]}, {}) == []
    (problem,) = problems({"a.b.c": frozenset({"self"})}, {"a.b.c": ["self", "more"]}, exact)
    assert problem == "a.b.c takes self, more; expected self"


OURS = """
from json import loads
from eng.inner import Base, record as made, parts
class Sub(Base):
    own: int
    def act(self):
        self.mine = made(self.theirs, width=1)
        self.kvbench_note = self.mine, self.own, self.act, self.kvbench_note
        return super().act(parts.Wheel, Base.KIND)
class Sglang0001:
    def old(self):
        from eng.old import gone
class Sglang0002:
    def new(self):
        from eng.new import come
"""


def test_uses_are_imports_attributes_keywords_and_what_is_inherited() -> None:
    found = uses(ast.parse(OURS), "eng", "Sglang0002", {})
    expected = {
        "eng.inner:Base", "eng.inner:Base.KIND", "eng.inner:Base.act", "eng.inner:Base.theirs",
        "eng.inner:parts", "eng.inner:parts.Wheel", "eng.inner:record", "eng.new:come",
    }  # fmt: skip
    assert found.keys() == expected
    assert {path: words for path, words in found.items() if words} == {
        "eng.inner:record": frozenset({"width"})
    }


THEIRS = """
def end(self, request, session):
    self._pool.free(request.rows, session.name, request.kvbench_note, request.__class__)
    for block in request.blocks:
        block.count = request.session.number + request.pages[0].size + self.pages[0][1].left
    return self.version.held(request).length, session.held
"""


def test_uses_are_attributes_of_the_engines_own_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever holds them: a parameter, an attribute, a loop, or what a method returns."""
    kinds = {
        "request": "eng:Request", "request.session": "eng:Session", "_pool": "eng:Pool",
        "block": "eng:Block", "held()": "eng:Held", "pages[]": "eng:Page",
    }  # fmt: skip
    expected = {
        "eng:Request.rows", "eng:Request.session", "eng:Request.blocks", "eng:Session.number",
        "eng:Pool.free", "eng:Block.count", "eng:Held.length", "eng:Request.pages", "eng:Page.size",
    }  # fmt: skip
    assert uses(ast.parse(THEIRS), "eng", "", kinds).keys() == expected
    monkeypatch.setattr(engine_symbols, "objects_of", lambda *_: {"request": "vllm.v1.request:Old"})
    gone = problems(wanted("vllm", "0.33.0"), facts_of("vllm", "0.33.0"), {})
    assert "vllm.v1.request:Old.num_computed_tokens is gone" in gone


ENGINE = {
    "eng/__init__.py": "",
    "eng/inner/__init__.py": """
from typing import TYPE_CHECKING
from .things import *
from ..root import Root as Above
if TYPE_CHECKING:
    current: "Above"
    here: Above
class Base(Above):
    KIND = 1
    def act(self, one, *rest, two=2, **more):
        self.theirs = 3
""",
    "eng/inner/things.py": """
from dataclasses import dataclass
import msgspec
@dataclass(frozen=True)
class record:
    height: int
    width: int = 1
class Message(msgspec.Struct, kw_only=True):
    first: int
class Longer(Message, kw_only=True):
    second: int
class Plain:
    def __init__(self, given): ...
""",
    "eng/inner/parts.py": "class Wheel: ...",
    "eng/root.py": "class Root:\n    async def go(self, far): ...\n",
}


def test_facts_are_read_through_imports_bases_and_branches(tmp_path: Path) -> None:
    for name, text in ENGINE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    expected: dict[str, list[str] | None] = {
        "eng.inner:Base.KIND": None,
        "eng.inner:Base.theirs": None,
        "eng.inner:Base.act": ["self", "one", "rest", "two", "more"],
        "eng.inner.Base.go": ["self", "far"],
        "eng.inner:here.go": ["self", "far"],
        "eng.inner:record": ["height", "width"],
        "eng.inner:Longer": ["first", "second"],
        "eng.inner.things:Plain": ["given"],
        "eng.inner:parts.Wheel": None,
    }
    gone = ["eng.inner:Base.gone", "eng.inner:nobody", "eng.nowhere:x", "nowhere.at.all"]
    assert Source(tmp_path).facts([*expected, *gone]) == expected


def test_the_script_writes_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_symbols, "FACTS", tmp_path / "symbols")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "logger.py").write_text("def init_logger(name): ...\n")
    monkeypatch.setattr(sys, "argv", ["x", "vllm", "0.33.0", str(tmp_path)])
    engine_symbols.main()
    written = json.loads((tmp_path / "symbols" / "vllm-0.33.0.json").read_text())
    assert written == {"vllm.logger:init_logger": ["name"]}
    assert "vllm.platforms:current_platform is gone" in capsys.readouterr().out.splitlines()
