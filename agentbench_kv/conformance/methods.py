"""Properties every KV-cache method must have, checked on random caches with holes.

The caches are what an engine really holds after evictions: heads hold different tokens, rows are
not in the order of positions, rings are not all full.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import KEPT_SETS, LayerView, Method, Queries, QueryKind, Selection
from agentbench_kv.methods.phases import Phase
from agentbench_kv.registry import make_method

LAYERS, KV_HEADS, GROUP, HEAD_DIM = 2, 2, 2, 8


@dataclass(frozen=True)
class Scene:
    """What a method is given at one event."""

    layers: list[LayerView]
    queries: list[Queries]
    now: int

    def select(self, method: Method) -> Selection:
        """Let `method` choose."""
        return method.select(self.layers, self.queries, self.now)

    def positions(self, selection: Selection) -> Tensor:
        """Return the kept positions [layers, kv_heads, budget], ascending."""
        places = torch.stack([view.positions for view in self.layers])
        return places.gather(-1, selection.kept).sort(-1).values

    def with_keys(self, change: Callable[[Tensor], Tensor]) -> Scene:
        """Return the scene with other keys."""
        return replace(self, layers=[replace(v, keys=change(v.keys)) for v in self.layers])

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor a method sees."""
        parts: list[LayerView | Queries] = [*self.layers, *self.queries]
        for part in parts:
            yield from (getattr(part, f.name) for f in dataclasses.fields(part))


def make_scene(
    method: Method, tokens: int, *, seed: int = 0, phases: Sequence[int] = (0, 1, 2, 3)
) -> Scene:
    """Build a random cache of `tokens` rows per head and the queries `method` asks for.

    Heads hold the same tokens only as far as the method's kept set is shared; the first and last
    tokens are always there, because the method keeps them.
    """
    generator = torch.Generator().manual_seed(seed)
    now = tokens + tokens // 2
    held = _held_positions(method, tokens, now, generator)
    layers = []
    for places in held:
        order = torch.stack([torch.randperm(tokens, generator=generator) for _ in places])
        keys, values = torch.randn(2, KV_HEADS, tokens, HEAD_DIM, generator=generator) * 2
        layers.append(LayerView(keys, values, places.gather(-1, order)))
    return Scene(layers, _make_queries(method, now, phases, generator), now)


def _held_positions(
    method: Method, tokens: int, now: int, generator: torch.Generator
) -> list[Tensor]:
    fixed = [*range(min(method.sinks, now)), *range(max(0, now - method.recent_kept()), now)]
    fixed = list(dict.fromkeys(fixed))[-tokens:]
    free = torch.tensor([p for p in range(now) if p not in set(fixed)])

    def draw() -> Tensor:
        chosen = free[torch.randperm(len(free), generator=generator)[: tokens - len(fixed)]]
        return torch.cat([torch.tensor(fixed, dtype=torch.int64), chosen]).sort().values

    if method.kept_set == "shared":
        return [draw().expand(KV_HEADS, -1)] * LAYERS
    if method.kept_set == "per_kv_head":
        return [torch.stack([draw() for _ in range(KV_HEADS)])] * LAYERS
    return [torch.stack([draw() for _ in range(KV_HEADS)]) for _ in range(LAYERS)]


def _make_queries(
    method: Method, now: int, phases: Sequence[int], generator: torch.Generator
) -> list[Queries]:
    plan = method.query_plan()
    choice = torch.randint(len(phases), (now,), generator=generator)
    labels = torch.tensor(phases)[choice]
    kept: list[int] = []
    if plan.kind is QueryKind.RECENT:
        kept = list(range(max(0, now - plan.size), now))
    elif plan.kind is QueryKind.PER_PHASE:
        rings = [(labels == int(p)).nonzero()[:, 0].tolist() for p in Phase]
        kept = sorted(p for ring in rings for p in ring[-plan.size :])
    places = torch.tensor(kept, dtype=torch.int64)
    shape = (LAYERS, KV_HEADS * GROUP, len(kept), HEAD_DIM)
    vectors = torch.randn(shape, generator=generator) * 2
    return [Queries(layer, places, labels[places]) for layer in vectors]


def check_method(
    method: str | type[Method] | Method, budget: int | None = None, seeds: Sequence[int] = (0, 1, 2)
) -> list[CheckResult]:
    """Check the properties of one method.

    Parameters
    ----------
    method : str, class or Method
        `name` or `name@preset` of a registered method, a class, or a method already built.
    budget : int, optional
        Tokens to keep; 16 above what the method always keeps if not given.
    seeds : sequence of int
        Random caches to try.
    """
    built = _build(method, budget)
    if not built.compresses:
        return [CheckResult("does not compress", True)]
    results = [_run(name, partial(check, built)) for name, check in _SETTINGS_CHECKS.items()]
    for name, check in _CHECKS.items():
        found = (_run(name, partial(check, built, seed)) for seed in seeds)
        results.append(next((r for r in found if not r.ok), CheckResult(name, True)))
    return results


def _build(method: str | type[Method] | Method, budget: int | None) -> Method:
    if isinstance(method, Method):
        return method
    make = partial(make_method, method) if isinstance(method, str) else partial(method.create, "")
    if budget is not None:
        return make(budget)
    probe = make_method(method, 1 << 20) if isinstance(method, str) else method.create("", 1 << 20)
    if not probe.compresses:
        return make(None)
    return replace(probe, budget=probe.sinks + probe.recent_kept() + 16)


def _run(name: str, check: Callable[[], str]) -> CheckResult:
    """Turn a check (empty text = holds) into a result; an exception is a failure."""
    try:
        problem = check()
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        problem = f"{type(error).__name__}: {error}"
    return CheckResult(name, not problem, problem)


def _budget(method: Method) -> int:
    return method.budget or 0


def _tokens(method: Method) -> int:
    return _budget(method) + 40


def _difference(before: Tensor, after: Tensor) -> str:
    """Say where two sets of kept positions differ, or nothing."""
    if before.shape != after.shape:
        return f"kept {tuple(after.shape)}, expected {tuple(before.shape)}"
    wrong = (before != after).any(-1).nonzero()
    if not len(wrong):
        return ""
    layer, head = (int(i) for i in wrong[0])
    old, new = set(before[layer, head].tolist()), set(after[layer, head].tolist())
    return f"layer {layer} head {head}: kept {sorted(new - old)} instead of {sorted(old - new)}"


def _scores_fit(method: Method, seed: int) -> str:
    scores = make_scene(method, _tokens(method), seed=seed).select(method).scores
    shape = (LAYERS, KV_HEADS, _tokens(method))
    return "" if scores.shape == shape else f"scores {tuple(scores.shape)}, expected {shape}"


def _keeps_budget(method: Method, seed: int) -> str:
    kept = make_scene(method, _tokens(method), seed=seed).select(method).kept
    shape = (LAYERS, KV_HEADS, _budget(method))
    if kept.shape != shape:
        return f"kept {tuple(kept.shape)}, expected {shape}"
    if not bool((kept[..., 1:] > kept[..., :-1]).all()):
        return "kept rows are not ascending and distinct"
    inside = (kept >= 0).all() and (kept < _tokens(method)).all()
    return "" if bool(inside) else "a kept row is outside the cache"


def _keeps_always(method: Method, seed: int) -> str:
    scene = make_scene(method, _tokens(method), seed=seed)
    recent = range(scene.now - method.recent_kept(), scene.now)
    must = {*range(method.sinks), *recent}
    for head in scene.positions(scene.select(method)).flatten(0, 1).tolist():
        if not must <= set(head):
            return f"evicted {sorted(must - set(head))}, which the method always keeps"
    return ""


def _keeps_all_under_budget(method: Method, seed: int) -> str:
    for tokens in (_budget(method), _budget(method) - 1):
        kept = make_scene(method, tokens, seed=seed).select(method).kept
        if kept.shape[-1] != tokens:
            return f"{kept.shape[-1]} of {tokens} tokens kept under a budget of {method.budget}"
    return ""


def _follows_scores(method: Method, seed: int) -> str:
    """Kept = always kept + highest scores, ties to the lower position; keys repeat to make ties."""
    scene = make_scene(method, _tokens(method), seed=seed)
    for case in (scene, scene.with_keys(torch.zeros_like), scene.with_keys(_repeated)):
        selection = case.select(method)
        places = torch.stack([view.positions for view in case.layers]).sort(-1).values
        expected = _ranked(places, selection.scores, _budget(method))
        problem = _difference(expected, case.positions(selection))
        if problem:
            return problem
    return ""


def _repeated(keys: Tensor) -> Tensor:
    return keys[:, :4].repeat(1, -(-keys.shape[1] // 4), 1)[:, : keys.shape[1]].contiguous()


def _ranked(places: Tensor, scores: Tensor, budget: int) -> Tensor:
    """Rank in plain Python: NaN (always kept) first, then by score, then by position."""
    heads = []
    for where, values in zip(
        places.flatten(0, 1).tolist(), scores.flatten(0, 1).tolist(), strict=True
    ):
        rows = zip(where, values, strict=True)
        best = sorted(rows, key=lambda row: (row[1] == row[1], -row[1], row[0]))
        heads.append(sorted(position for position, _ in best[:budget]))
    return torch.tensor(heads).reshape(*places.shape[:2], -1)


def _survives_extremes(method: Method, seed: int) -> str:
    """Constant, zero and huge keys give no NaN where a token competes."""
    scene = make_scene(method, _tokens(method), seed=seed)
    changes = {
        "constant": torch.ones_like,
        "zero": torch.zeros_like,
        "huge": lambda keys: keys * 1e4,
    }
    for name, change in changes.items():
        case = scene.with_keys(change)
        for index, view in enumerate(case.layers):
            selection = case.select(method)
            ordered = view.positions.sort(-1).values
            always = (ordered < method.sinks) | (ordered >= case.now - method.recent_kept())
            if bool(torch.isnan(selection.scores[index][~always]).any()):
                return f"NaN scores for {name} keys"
            if selection.kept.shape[-1] != _budget(method):
                return f"{selection.kept.shape[-1]} tokens kept for {name} keys"
    return ""


def _follows_heads(method: Method, seed: int) -> str:
    """Permuting KV heads with their query groups permutes what is kept."""
    scene = make_scene(method, _tokens(method), seed=seed)
    order = torch.arange(KV_HEADS).flip(0)
    rows = torch.arange(KV_HEADS * GROUP).reshape(KV_HEADS, GROUP)[order].flatten()
    layers = [LayerView(v.keys[order], v.values[order], v.positions[order]) for v in scene.layers]
    queries = [replace(q, vectors=q.vectors[rows]) for q in scene.queries]
    swapped = Scene(layers, queries, scene.now)
    expected = scene.positions(scene.select(method))[:, order]
    return _difference(expected, swapped.positions(swapped.select(method)))


def _ignores_cache_order(method: Method, seed: int) -> str:
    scene = make_scene(method, _tokens(method), seed=seed)
    order = torch.randperm(_tokens(method), generator=torch.Generator().manual_seed(seed))
    layers = [
        LayerView(v.keys[:, order], v.values[:, order], v.positions[:, order]) for v in scene.layers
    ]
    shuffled = replace(scene, layers=layers)
    expected = scene.positions(scene.select(method))
    return _difference(expected, shuffled.positions(shuffled.select(method)))


def _has_no_memory(method: Method, seed: int) -> str:
    """Another session in between changes nothing; inputs are left as they were."""
    scene = make_scene(method, _tokens(method), seed=seed)
    copies = [tensor.clone() for tensor in scene.tensors()]
    first = scene.positions(scene.select(method))
    make_scene(method, _tokens(method) + 8, seed=seed + 1).select(method)
    problem = _difference(first, scene.positions(scene.select(method)))
    if problem:
        return f"the second call differs: {problem}"
    same = all(torch.equal(a, b) for a, b in zip(copies, scene.tensors(), strict=True))
    return "" if same else "select changed the cache or the queries it was given"


def _shares_kept_sets(method: Method, seed: int) -> str:
    for kept_set in KEPT_SETS:
        variant = replace(method, kept_set=kept_set)
        scene = make_scene(variant, _tokens(variant), seed=seed)
        kept = scene.positions(scene.select(variant))
        if kept_set != "per_head" and not torch.equal(kept, kept[:1].expand_as(kept)):
            return f"kept_set={kept_set}: layers keep different tokens"
        if kept_set == "shared" and not torch.equal(kept, kept[:, :1].expand_as(kept)):
            return "kept_set=shared: KV heads keep different tokens"
    return ""


def _works_with_young_rings(method: Method, seed: int) -> str:
    """Keep a full set in a session that has seen one phase only."""
    scene = make_scene(method, _tokens(method), seed=seed, phases=(int(Phase.OTHERS),))
    selection = scene.select(method)
    if selection.kept.shape[-1] != _budget(method):
        return f"{selection.kept.shape[-1]} tokens kept"
    return "" if bool((~torch.isnan(selection.scores)).any()) else "all scores are NaN"


def _refuses(method: Method, **changes: object) -> str:
    arguments = {"budget": method.budget, "settings": method.settings(), **changes}
    try:
        type(method).create(method.preset, **arguments)  # type: ignore[arg-type]
    except UsageError as error:
        return "" if str(error).strip() and "\n" not in str(error) else "message is not one line"
    return f"{changes} is accepted, expected a UsageError"


def _refuses_bad_budgets(method: Method) -> str:
    always = method.sinks + method.recent_kept()
    return next(filter(None, (_refuses(method, budget=b) for b in (None, 0, -1, always))), "")


def _refuses_bad_settings(method: Method) -> str:
    cases = ({"no_such_parameter": "1"}, {"interval": "0"}, {"interval": "x"}, {"trigger": "never"})
    return next(filter(None, (_refuses(method, settings=case) for case in cases)), "")


def _repeats_from_settings(method: Method) -> str:
    again = type(method).create(method.preset, method.budget, method.settings())
    return "" if again == method else f"create(settings()) gives {again}, expected {method}"


_SETTINGS_CHECKS: dict[str, Callable[[Method], str]] = {
    "refuses bad budgets": _refuses_bad_budgets,
    "refuses bad settings": _refuses_bad_settings,
    "its settings rebuild it": _repeats_from_settings,
}

_CHECKS: dict[str, Callable[[Method, int], str]] = {
    "scores fit the cache": _scores_fit,
    "keeps exactly the budget": _keeps_budget,
    "keeps what is always kept": _keeps_always,
    "keeps all under budget": _keeps_all_under_budget,
    "kept set follows scores, ties to the lower position": _follows_scores,
    "constant, zero and huge keys": _survives_extremes,
    "follows a permutation of KV heads": _follows_heads,
    "ignores the order of cache rows": _ignores_cache_order,
    "has no memory and changes nothing": _has_no_memory,
    "kept sets are shared as asked": _shares_kept_sets,
    "works before all rings are full": _works_with_young_rings,
}
