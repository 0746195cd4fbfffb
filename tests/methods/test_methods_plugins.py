"""Third-party methods: which classes are accepted, and what is said about the others.

The documented example is in `tests/docs`. Methods are installed as pip would: a module and a
`dist-info` folder on the path.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.registry import load_method, names

SCORE = (
    "score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor"  # as documented
)
_number = count()


def install(folder: Path, module: str, source: str, points: dict[str, str]) -> None:
    """Put a module and its entry points for methods into a folder."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[agentbench_kv.methods]", *lines, ""]))


# -- what is refused at registration

HEAD = """
from dataclasses import dataclass, field
from typing import ClassVar
from agentbench_kv.methods.base import Method
from agentbench_kv.params import param

class Plain: pass

@dataclass(frozen=True, kw_only=True)
class Scorer(Method):
    name: ClassVar[str] = "third"
    def score(self, queries, keys, context):
        return context.positions.float()
"""
DECORATOR = "@dataclass(frozen=True, kw_only=True)\n"


@pytest.fixture
def third(tmp_path, monkeypatch):
    """Return a function that installs source as method `third` and looks it up."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(source: str, target: str = "Third"):
        module = f"third_party_{next(_number)}"
        install(tmp_path, module, HEAD + source, {"third": f"{module}:{target}"})
        return load_method("third")

    return load


def line(third, *source):
    """The line a user sees."""
    with pytest.raises(UsageError) as caught:
        third(*source)
    text = str(caught.value)
    assert "\n" not in text
    assert "'third'" in text
    return text


def of(body: str, base: str = "Scorer", decorator: str = DECORATOR) -> str:
    """Source of a class `Third`."""
    return f"{decorator}class Third({base}):\n    {body}\n"


ACCEPTED = {
    "a subclass without fields": of("pass", decorator=""),
    "class attributes of its own": of("calls: ClassVar[list[int]] = []", decorator=""),
    "another default": of("sinks: int = param(4, 'first tokens', low=0)"),
    "a field that is no parameter": of("table: dict = field(default_factory=dict, compare=False)"),
    "a select instead of a score": of(
        "name: ClassVar[str] = 'third'\n"
        "    def select(self, layers, queries, now, prompt=0, phases=None): ...",
        "Method",
    ),
    "per_query_head as a property": of("@property\n    def per_query_head(self): return True"),
    "presets": of(
        "presets: ClassVar[dict] = {'few': {'interval': 8}}\n"
        "    default_preset: ClassVar[str] = 'few'"
    ),
}
REFUSED = {
    "no Method": (of("pass", "Plain"), f"not a subclass of Method; expected a class with {SCORE}"),
    "no class": ("Third = 3", f"(3) is not a subclass of Method; expected a class with {SCORE}"),
    "no score": (of("name: ClassVar[str] = 'third'", "Method"), f"has no score; expected {SCORE}"),
    "other arguments": (
        of("def score(self, q, k): ..."),
        f"defines score(self, q, k); expected {SCORE}",
    ),
    "static score": (
        of("@staticmethod\n    def score(queries, keys, context): ..."),
        f"defines score(queries, keys, context); expected {SCORE}",
    ),
    "score that is no function": (
        of("score = 3"),
        f"has a score that is no function; expected {SCORE}",
    ),
    "old hook": (
        of("def recent_kept(self): return 3"),
        "defines recent_kept(self); expected recent_kept(self, budget: int) -> int",
    ),
    "hook that is a value": (
        of("query_plan = None"),
        "has a query_plan that is no function; expected query_plan(self) -> QueryPlan",
    ),
    "forgotten property": (
        of("def per_query_head(self): return False"),
        "per_query_head as a function; put @property above it",
    ),
    "no name": (
        of("def score(self, queries, keys, context): ...", "Method"),
        "has no name; set name: ClassVar[str] = '...'",
    ),
    "other name": (
        of("name: ClassVar[str] = 'fourth'"),
        "calls itself 'fourth'; the entry point must agree",
    ),
    "name that is a field": (
        of("name: str = 'third'"),
        "declares name as a field; annotate it as name: ClassVar[...]",
    ),
    "name of a wrong type": (of("name: ClassVar = 3"), "has name = 3; expected text"),
    "flag of a wrong type": (
        of("ordered: ClassVar = 'no'"),
        "has ordered = 'no'; expected True or False",
    ),
    "not decorated": (
        of("window: int = param(3, 'doc')", decorator=""),
        "declares window but is no dataclass of its own; put @dataclass(frozen=True, kw_only=True)",
    ),
    "default that nothing sees": (of("sinks: int = 4", decorator=""), "declares sinks but is no"),
    "not keyword-only": (
        of("window: int = param(3, 'doc')", decorator="@dataclass(frozen=True)\n"),
        "takes window by position; put @dataclass(frozen=True, kw_only=True) above it",
    ),
    "not frozen": (
        of("window: int = param(3, 'doc')", decorator="@dataclass(kw_only=True)\n"),
        "cannot load method 'third': TypeError: cannot inherit non-frozen dataclass",
    ),
    "no default": (
        of("window: int"),
        "has no default for window; write window: ... = param(DEFAULT, DOC)",
    ),
    "flag as a parameter": (
        of("fast: bool = param(True, 'doc')"),
        "has parameter fast = True; expected an int, a float or a str",
    ),
    "absent default": (of("window: int = param(None, 'doc')"), "has parameter window = None"),
    "type of the default": (
        of("share: float = param(1, 'doc')"),
        "has parameter share of type float with default 1, a int",
    ),
    "default out of range": (
        of("window: int = param(0, 'doc', low=1)"),
        "has parameter window with a default it does not allow: window=0: expected an integer >= 1",
    ),
    "default no choice": (
        of("pool: str = param('sum', 'doc', choices=('avg', 'max'))"),
        "does not allow: pool=sum: expected one of avg, max",
    ),
    "presets as a list": (
        of("presets: ClassVar = ['few']"),
        "has presets = ['few']; expected a mapping of names to settings",
    ),
    "preset that is no mapping": (
        of("presets: ClassVar = {'few': 8}"),
        "has preset 'few' = 8; expected a mapping of settings",
    ),
    "preset of an unknown parameter": (
        of("presets: ClassVar = {'few': {'intervall': 8}}"),
        "has preset 'few' with wrong settings: unknown third parameter 'intervall'; "
        "did you mean 'interval'?",
    ),
    "preset of a wrong value": (
        of("presets: ClassVar = {'few': {'interval': 0}}"),
        "has preset 'few' with wrong settings: interval=0: expected an integer >= 1",
    ),
    "default preset that is none": (
        of("presets: ClassVar = {'few': {}}\n    default_preset: ClassVar[str] = 'many'"),
        "has default_preset 'many', which is not among its presets: few",
    ),
    "import that fails": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such"),
    "file that is no Python": ("def (", "cannot load method 'third': SyntaxError"),
    "class that is not there": (of("pass").replace("Third", "Other"), "has no attribute 'Third'"),
}


@pytest.mark.parametrize("source", ACCEPTED.values(), ids=ACCEPTED)
def test_a_class_that_keeps_the_contract_is_accepted(third, source):
    assert third(source).name == "third"


@pytest.mark.parametrize(("source", "message"), REFUSED.values(), ids=REFUSED)
def test_a_class_that_breaks_the_contract_is_refused(third, source, message):
    assert message in line(third, source)


def test_annotations_may_be_postponed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "from __future__ import annotations\n" + HEAD
    body = of("share: float = param(1, 'doc')")
    install(tmp_path, "postponed_party", source + body, {"later": "postponed_party:Third"})
    with pytest.raises(UsageError, match=r"share of type float with default 1"):
        load_method("later")


def test_every_method_of_ours_keeps_the_contract():
    ours = names("method")
    assert len(ours) >= 10
    for name in ours:
        assert load_method(name).name == name
