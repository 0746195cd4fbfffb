"""Scorer presses of NVIDIA's kvpress as methods: `--method 'kvpress:SnapKVPress(window_size=32)'`.

A press scores the tokens of one layer after a prefill. Here it is called at every event with what
an engine keeps: keys, values and the last queries. Those queries are post-RoPE, so the attention
module a press is handed is a stand-in that neither projects nor rotates. Budget, trigger, kept sets
and everything else are the base's.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from agentbench_kv.errors import PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.base import Method, Queries, QueryKind, QueryPlan, ScoreContext


@dataclass(frozen=True)
class Traits:
    """What is known of a press of kvpress 0.5: which rows score highest, and what it looks at."""

    first: int | str = 0  # number of rows, or the argument that holds it
    last: int | str = 0
    queries: bool = False
    heads_alike: bool = True
    # A setting under which it draws from torch's own generator.
    unrepeatable: tuple[str, Any] | None = None


FIT: Mapping[str, Traits] = {
    "CURPress": Traits(first="num_sinks", unrepeatable=("use_random_leverage", True)),
    "KeyDiffPress": Traits(),
    "KnormPress": Traits(),
    "LagKVPress": Traits(first="n_sink", last="lag_size"),
    "RandomPress": Traits(heads_alike=False, unrepeatable=("seed", None)),
    "SnapKVPress": Traits(last="window_size", queries=True),
    "StreamingLLMPress": Traits(first="n_sink"),
    "TOVAPress": Traits(last=1, queries=True),
}
# Reason -> the presses that are refused for it, by name.
UNFIT: Mapping[str, str] = {
    "it needs the hidden states of every token, which no engine keeps": (
        "CapPress CompactorPress LeverageScorePress NonCausalAttnPress"
    ),
    "it needs the hidden states of every token, which no engine keeps; --method expected-attention "
    "takes their statistics from a calibration": "ExpectedAttentionPress",
    "it needs the attention of every query; --method h2o@kvpress is the same": (
        "ObservedAttentionPress"
    ),
    "it needs weights or statistics made for one model": (
        "DuoAttentionPress ExpectedAttentionStatsPress FastKVzipPress KVzapPress QFilterPress"
    ),
    "it needs several passes over the prompt": (
        "KVComposePress KVgradPress KVzipPress RestoreKVPress"
    ),
    "it wraps another press, which must be named by itself": (
        "AdaKVPress BlockPress CAMPress ChunkKVPress ChunkPress ComposedPress "
        "CompressionRatioDecodingPress CriticalAdaKVPress CriticalKVPress DMSPress DecodingPress "
        "EntropyGatedChunkKVPress KeyRerotationPress LUKVPress MergingPress "
        "PerLayerCompressionPress PrefillDecodingPress"
    ),
    "it gives layers budgets of their own; SnapKVPress scores alike": "PyramidKVPress",
    "it compresses some layers and leaves others": "SimLayerKVPress",
    "it removes channels of keys, not tokens": "ThinKPress",
    "it needs a delimiter between context and question": "FinchPress",
    "it is a base class": "BasePress ScorerPress",
}


PREFIX = "kvpress:"
EXAMPLE = "kvpress:SnapKVPress(window_size=32)"
INSTALL = "pip install kvpress==0.5.5, in an environment of its own: it needs transformers < 5.3"
LARGEST_TRIAL = 4096  # tokens of the largest cache on which a press is tried before anything starts
HINT = (
    f"{EXAMPLE} runs a scorer press of NVIDIA's kvpress where that is installed "
    f"({', '.join(FIT)}); see docs/add-a-method.md"
)


@dataclass(frozen=True)
class Press:
    """A `kvpress.ScorerPress` class with its arguments."""

    cls: Any
    arguments: tuple[tuple[str, Any], ...] = ()  # those that differ from the press's defaults
    first: int = 0  # tokens at either end that the press always ranks highest
    last: int = 0
    queries: bool = False  # does it use them?

    @property
    def text(self) -> str:
        """How it is written after `kvpress:`; the same for every spelling of the same press."""
        inside = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.cls.__name__}({inside})"

    def score(
        self, vectors: Tensor, keys: Tensor, values: Tensor, layer: int, budget: int
    ) -> Tensor:
        """Let the press score one layer: [kv_heads, tokens].

        `vectors` [q_heads, n, head_dim] are the queries of the last tokens, post-RoPE as the keys;
        `keys` and `values` [kv_heads, tokens, head_dim] come by ascending position.
        """
        q_heads, n, head_dim = vectors.shape
        kv_heads, tokens, _ = keys.shape
        # Half a token more than the budget: kvpress rounds tokens · (1 - ratio) down.
        press = self.cls(compression_ratio=1 - (budget + 0.5) / tokens, **dict(self.arguments))
        hidden = vectors.transpose(0, 1).flatten(1)[None].to(keys.dtype)
        unrotated = (keys.new_ones(1, n, head_dim), keys.new_zeros(1, n, head_dim))
        # An attention module whose hidden states are queries already.
        config = SimpleNamespace(num_attention_heads=q_heads, num_key_value_heads=kv_heads)
        attention = SimpleNamespace(
            config=config, head_dim=head_dim, layer_idx=layer, q_proj=lambda hidden: hidden
        )
        rows = keys[None], values[None]
        scores = press.score(attention, hidden, *rows, None, {"position_embeddings": unrotated})
        return cast("Tensor", scores)[0]


@dataclass(frozen=True, kw_only=True)
class KVPressMethod(Method):
    """Keep what a scorer press of kvpress scores highest; `press_method` makes a class per press.

    The press scores all tokens, those it always keeps too; where it leaves ties, the lower position
    stays.
    """

    name: ClassVar[str] = "kvpress"
    summary: ClassVar[str] = "a scorer press of NVIDIA's kvpress"
    source: ClassVar[str] = "https://github.com/NVIDIA/kvpress"
    press: ClassVar[Press]

    def first_kept(self, protected: int) -> int:
        return max(self.press.first, super().first_kept(protected))

    def recent_kept(self, budget: int) -> int:  # noqa: ARG002
        return max(self.press.last, self.keep_recent)

    def query_plan(self) -> QueryPlan:
        if not self.press.queries:
            return QueryPlan()
        # One more than the window, as presses want to see more than that.
        return QueryPlan(QueryKind.RECENT, self.press.last + 1)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        scores = self.press.score(
            queries.vectors, keys, context.values, context.layer, context.budget
        )
        # kvpress leaves the choice to torch.topk, which ranks NaN above everything.
        return scores.float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def press_method(text: str) -> type[KVPressMethod]:
    """Return the method class of a press, `SnapKVPress(window_size=32)`; nothing is evaluated."""
    name, arguments = _parsed(text)
    for reason, presses in UNFIT.items():
        if name in presses.split():
            raise UsageError(
                f"{PREFIX}{name} cannot run as a method: {reason} (these can: {', '.join(FIT)})"
            )
    if "compression_ratio" in arguments:
        raise UsageError(f"{PREFIX}{name} takes no compression_ratio here: --budget decides")
    cls = _press_class(_kvpress(), name)
    return _method_class(_press(cls, _checked(cls, arguments)), FIT[name].heads_alike)


@cache
def _method_class(press: Press, heads_alike: bool) -> type[KVPressMethod]:
    """Return the class of a press, the same one every time, so that equal methods are equal."""
    _try_out(press)
    attributes = {
        "__module__": __name__,
        "__doc__": KVPressMethod.__doc__,
        "name": PREFIX + press.text,
        "summary": f"{press.text} of NVIDIA's kvpress",
        "treats_heads_alike": heads_alike,
        "press": press,
    }
    return cast("type[KVPressMethod]", type(press.cls.__name__, (KVPressMethod,), attributes))


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Read `NAME` or `NAME(argument=literal, ...)`."""
    wrong = UsageError(
        f"{PREFIX + text[:80]!r}: expected a press with its arguments by name, e.g. {EXAMPLE}"
    )
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise wrong from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise wrong
    names = [keyword.arg for keyword in call.keywords]
    if None in names or len(set(names)) < len(names):
        raise wrong
    return call.func.id, {str(each.arg): _literal(each) for each in call.keywords}


def _literal(keyword: ast.keyword) -> bool | int | float | str | None:
    try:
        value = ast.literal_eval(keyword.value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        value = ...
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"{PREFIX} {keyword.arg}={ast.unparse(keyword.value)}: expected a number, a text, "
        "True, False or None"
    )


def _kvpress() -> Any:
    """Import kvpress 0.5; a copy without a version is taken as it is."""
    try:
        module = import_module("kvpress")
    except Exception as error:
        problem = f"kvpress does not import here: {type(error).__name__}: {error}; {INSTALL}"
        if isinstance(error, ModuleNotFoundError) and error.name == "kvpress":
            problem = f"{PREFIX}... needs kvpress, which is not installed: {INSTALL}"
        raise PrerequisiteError(problem) from error
    try:
        found = version("kvpress")
    except PackageNotFoundError:
        return module
    if not found.startswith("0.5."):
        raise PrerequisiteError(f"kvpress {found} is installed; {PREFIX}... needs 0.5: {INSTALL}")
    return module


def _press_class(kvpress: Any, name: str) -> Any:
    cls = getattr(kvpress, name, None)
    if not isinstance(cls, type):
        raise unknown_name("kvpress press", name, FIT)
    if not issubclass(cls, kvpress.ScorerPress):
        raise UsageError(f"{PREFIX}{name} cannot run as a method: it is no ScorerPress")
    if name not in FIT:
        raise UsageError(
            f"{PREFIX}{name} is not known to need only keys, values and the last queries; "
            f"these are: {', '.join(FIT)}"
        )
    return cls


def _checked(cls: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    known = {f.name: f for f in fields(cls) if f.init and f.name != "compression_ratio"}
    for name in arguments:
        if name not in known:
            raise unknown_name(f"{PREFIX}{cls.__name__} argument", name, known)
    given = {name: _typed(known[name], value) for name, value in arguments.items()}
    return {name: f.default for name, f in known.items()} | given


def _typed(field: Field[Any], value: Any) -> Any:
    """Check a value against the type of its default; no default is a count that may be absent."""
    kind = int if field.default in (None, MISSING) else type(field.default)
    if kind is float and type(value) is int:
        return float(value)
    good = type(value) is kind or (value is None and field.default is None)
    if not good or (kind is int and value is not None and value < 0):
        words = {int: "an integer >= 0", float: "a number", bool: "True or False", str: "a text"}
        raise UsageError(f"{field.name}={value!r}: expected {words.get(kind, kind.__name__)}")
    return value


def _press(cls: Any, chosen: Mapping[str, Any]) -> Press:
    traits = FIT[cls.__name__]
    if traits.unrepeatable and chosen.get(traits.unrepeatable[0]) is traits.unrepeatable[1]:
        name, value = traits.unrepeatable
        raise UsageError(
            f"{PREFIX}{cls.__name__} with {name}={value} draws other numbers in every run, "
            "so none could be repeated; choose another value"
        )
    defaults = {f.name: f.default for f in fields(cls)}
    changed = sorted((name, value) for name, value in chosen.items() if value != defaults[name])
    first, last = (n if isinstance(n, int) else chosen[n] for n in (traits.first, traits.last))
    return Press(cls, tuple(changed), first, last, traits.queries)


def _try_out(press: Press) -> None:
    """Score a few random rows, so that arguments which cannot work show before anything starts."""
    tokens = press.first + 2 * press.last + 8
    if tokens > LARGEST_TRIAL:
        return
    rows = torch.randn(3, 1, tokens, 4, generator=torch.Generator().manual_seed(0))
    try:
        scores = press.score(rows[0][:, : press.last + 1], rows[1], rows[2], 0, tokens - 4)
    except Exception as error:
        raise UsageError(
            f"{PREFIX}{press.text} cannot score: {type(error).__name__}: {error}"
        ) from error
    if scores.shape != (1, tokens):
        raise UsageError(
            f"{PREFIX}{press.text} gave scores {tuple(scores.shape)}, expected one each"
        )
