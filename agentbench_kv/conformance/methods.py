"""The method conformance suite: selections on random caches, then the engine with the method.

What `kvbench selftest method` runs (`method_suite`); a plug-in's own tests call it the same way.
A property of a selection is a function that says what is wrong, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.analysis.replay import MethodInput
from agentbench_kv.conformance import CheckResult, guarded
from agentbench_kv.conformance.devices import choose_elsewhere
from agentbench_kv.conformance.driver import drive, short_turns
from agentbench_kv.conformance.drop_checks import check_drops
from agentbench_kv.conformance.kept_sets import check_replay, check_sessions
from agentbench_kv.conformance.masked import check_masked_cache
from agentbench_kv.conformance.memory_checks import check_memory
from agentbench_kv.conformance.plain_memory_checks import check_plain_memory
from agentbench_kv.conformance.reference import tiny_model
from agentbench_kv.conformance.scenes import (
    CacheShape,
    always_kept,
    made_up_calibration,
    make_scene,
)
from agentbench_kv.conformance.span_checks import check_spans
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import KEPT_SETS, LayerView, Method, Phase, Selection
from agentbench_kv.methods.dropping.policy import DropMethod
from agentbench_kv.methods.memory.plain import PlainMemory
from agentbench_kv.methods.spans import SpanMethod
from agentbench_kv.registry import make_method

ENGINE_BUDGET = 160
"""Tokens kept where an engine runs: above the prompts of short sessions, below their lengths."""

LONGEST_OPENING = (120, 40)
"""Tokens of the longest first prompt there, and of its system message."""

SHAPE = CacheShape()


def method_suite(
    method: str | type[Method] | Method, budget: int | None = None
) -> dict[str, list[CheckResult]]:
    """Run every check there is on one method, on random caches and on tiny random models.

    The method is as `build_method` takes it; a budget is chosen for each part if none is given. A
    part that raises is one failed result.
    """
    small = build_method(method, budget)
    if isinstance(small, SpanMethod):
        return {"spans": guarded(partial(check_spans, small))}
    if isinstance(small, DropMethod):
        return {"messages": guarded(partial(check_drops, small))}
    if isinstance(small, PlainMemory):
        return {f"memory, {small.name}": guarded(partial(check_plain_memory, small))}
    if small.remembers:
        families = {name: tiny_model(name, layers=2) for name in ("qwen3", "llama")}
        return {
            f"memory, {name}": guarded(partial(check_memory, small, model))
            for name, model in families.items()
        }
    parts: dict[str, Callable[[], list[CheckResult]]] = {"selection": partial(check_method, small)}
    if not small.offline:
        large = small
        if budget is None and small.compresses and small.budget is not None:
            large = replace(small, budget=max(small.budget, ENGINE_BUDGET))
            while not large.has_room(large.budget or 0, large.protected(*LONGEST_OPENING)):
                large = replace(large, budget=(large.budget or 0) + 32)
        qwen3, llama = tiny_model("qwen3", layers=2), tiny_model("llama", kv_heads=1, layers=2)
        parts["masked cache, qwen3"] = partial(check_masked_cache, large, qwen3)
        parts["masked cache, llama"] = partial(check_masked_cache, large, llama)
        parts["replay"] = partial(_replay, large, qwen3)
        parts["sessions"] = partial(check_sessions, large)
    return {part: guarded(check) for part, check in parts.items()}


def _replay(method: Method, model: Any) -> list[CheckResult]:
    often = replace(method, interval=16)
    trace = drive(model, often, {"only": short_turns(int(model.config.vocab_size))})["only"]
    return [check_replay("only", model, often, trace)]


def check_method(
    method: str | type[Method] | Method, budget: int | None = None, seeds: Sequence[int] = (0, 1, 2)
) -> list[CheckResult]:
    """Check the properties of one method as `build_method` takes it, on a random cache per seed."""
    built = calibrated(build_method(method, budget))
    if not built.compresses:
        return [CheckResult("does not compress", True)]
    checks = [(name, [partial(check, built)]) for name, check in SETTINGS_CHECKS.items()]
    checks += [
        (name, [partial(check, built, seed) for seed in seeds])
        for name, check in SELECTION_CHECKS.items()
    ]
    return [CheckResult.unless(_first_problem(cases), name) for name, cases in checks]


def _first_problem(cases: Sequence[Callable[[], str]]) -> str:
    try:
        return next(filter(None, (case() for case in cases)), "")
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        return f"{type(error).__name__}: {error}"


def build_method(
    method: str | type[Method] | Method,
    budget: int | None = None,
    *,
    preset: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Method:
    """Return a method with a budget: the given one, or a little above what it always keeps.

    `method` is `name` or `name@preset` of a registered method, a class, or one already built, which
    is returned as it is; `preset` is for a class; `settings` are parameters by name, as `--set`
    takes them.
    """
    if isinstance(method, Method):
        return method
    make = (
        partial(make_method, method) if isinstance(method, str) else partial(method.create, preset)
    )
    if budget is not None:
        return make(budget, settings)
    probe = make(1 << 20, settings)
    if not probe.compresses:
        return make(None, settings)
    budget = 16
    # What `make_scene` protects is a third of the budget.
    while not probe.has_room(budget - 15, probe.protected(budget // 3, budget // 6)):
        budget += 1
    return replace(probe, budget=budget)


def calibrated(method: Method, shape: CacheShape = SHAPE, heads: Tensor | None = None) -> Method:
    """Return the method with made-up statistics of a model, if it needs any.

    `heads` [q_heads] is another order of the query heads.
    """
    if not method.needs_calibration:
        return method
    frequencies = 1e4 ** -torch.linspace(0, 1, shape.head_dim // 2)
    made = made_up_calibration(shape.layers, shape.q_heads, frequencies)
    order = torch.arange(shape.q_heads) if heads is None else heads
    return method.with_calibration(made.part(heads=order))


def _budget(method: Method) -> int:
    return method.budget or 0


def _scene(method: Method, seed: int, more: int = 40, **options: Any) -> MethodInput:
    """Make a cache of `more` tokens than the budget."""
    return make_scene(method, _budget(method) + more, seed=seed, **options)


def _live(scene: MethodInput) -> int:
    return scene.places.shape[-1]


def _count_problem(method: Method, selection: Selection, where: str = "") -> str:
    kept = selection.kept.shape[-1]
    return "" if kept == _budget(method) else f"{kept} tokens kept{where}"


def _difference(before: Tensor, after: Tensor) -> str:
    """Say where two sets of kept positions differ; empty if they do not."""
    if before.shape != after.shape:
        return f"kept {tuple(after.shape)}, expected {tuple(before.shape)}"
    wrong = (before != after).any(-1).nonzero()
    if not len(wrong):
        return ""
    layer, head = (int(i) for i in wrong[0])
    old, new = set(before[layer, head].tolist()), set(after[layer, head].tolist())
    return f"layer {layer} head {head}: kept {sorted(new - old)} instead of {sorted(old - new)}"


def _scores_fit(method: Method, seed: int) -> str:
    scene = _scene(method, seed)
    found, expected = tuple(scene.select(method).scores.shape), tuple(scene.places.shape)
    return "" if found == expected else f"scores {found}, expected {expected}"


def _works_on_a_gpu(method: Method, seed: int) -> str:
    choose_elsewhere(method, _scene(method, seed))
    return ""


def _keeps_budget(method: Method, seed: int) -> str:
    scene = _scene(method, seed)
    kept = scene.select(method).kept
    expected = (*scene.places.shape[:2], _budget(method))
    if kept.shape != expected:
        return f"kept {tuple(kept.shape)}, expected {expected}"
    if not bool((kept[..., 1:] > kept[..., :-1]).all()):
        return "kept rows are not ascending and distinct"
    inside = (kept >= 0).all() and (kept < _live(scene)).all()
    return "" if bool(inside) else "a kept row is outside the cache"


def _keeps_always(method: Method, seed: int) -> str:
    scene = _scene(method, seed)
    must = set(always_kept(method, scene.now, scene.prompt).nonzero()[:, 0].tolist())
    for head in scene.positions(scene.select(method)).flatten(0, 1).tolist():
        if not must <= set(head):
            return f"evicted {sorted(must - set(head))}, which the method always keeps"
    return ""


def _keeps_protected(method: Method, seed: int) -> str:
    if type(method).select is not Method.select:
        return ""  # it takes no `protect`
    for protect, first in {"system": 4, "prompt": 9, "7": 7}.items():
        variant = replace(method, protect=protect)
        while not variant.has_room(_budget(variant), 9):
            variant = replace(variant, budget=_budget(variant) + 8)
        scene = _scene(variant, seed, prompt=9)
        selection = scene.select(variant)
        if problem := _count_problem(variant, selection, f" under protect={protect}"):
            return problem
        if bool((scene.positions(selection)[..., :first] != torch.arange(first)).any()):
            return f"protect={protect} with {first} tokens evicts one of them"
    return ""


def _keeps_all_under_budget(method: Method, seed: int) -> str:
    for more in (0, -1):
        scene = _scene(method, seed, more)
        kept = scene.select(method).kept.shape[-1]
        if kept != _live(scene):
            return f"{kept} of {_live(scene)} tokens kept under a budget of {method.budget}"
    return ""


def _follows_scores(method: Method, seed: int) -> str:
    """Kept = always kept + highest scores, ties to the lower position; keys repeat to make ties."""
    scene = _scene(method, seed)
    for case in (scene, scene.with_keys(torch.zeros_like), scene.with_keys(_repeated)):
        selection = case.select(method)
        expected = _ranked(case.places, selection.scores, _budget(method))
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
    scene = _scene(method, seed)
    always = always_kept(method, scene.now, scene.prompt)[scene.places]
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "constant": torch.ones_like,
        "zero": torch.zeros_like,
        "huge": lambda keys: keys * 1e4,
    }
    for name, change in changes.items():
        selection = scene.with_keys(change).select(method)
        if bool(torch.isnan(selection.scores[~always]).any()):
            return f"NaN scores for {name} keys"
        if problem := _count_problem(method, selection, f" for {name} keys"):
            return problem
    return ""


def _indexed(scene: MethodInput, index: Any) -> list[LayerView]:
    """Return the layers with other KV heads or rows."""
    views = []
    for view in scene.layers:
        sums = None if view.sums is None else view.sums[index]
        views.append(LayerView(view.keys[index], view.values[index], view.positions[index], sums))
    return views


def _follows_heads(method: Method, seed: int) -> str:
    """Permuting KV heads with their query groups permutes what is kept."""
    if not method.treats_heads_alike:
        return ""
    scene, shape = _scene(method, seed), SHAPE.of_cache(method)
    order = torch.arange(shape.kv_heads).flip(0)
    rows = torch.arange(shape.q_heads).reshape(shape.kv_heads, shape.group)[order].flatten()
    queries = [replace(q, vectors=q.vectors[rows]) for q in scene.queries]
    swapped = replace(scene, layers=_indexed(scene, order), queries=queries)
    expected = scene.positions(scene.select(method))[:, order]
    found = swapped.select(calibrated(method, heads=rows))
    return _difference(expected, swapped.positions(found))


def _ignores_cache_order(method: Method, seed: int) -> str:
    scene = _scene(method, seed)
    order = torch.randperm(_live(scene), generator=torch.Generator().manual_seed(seed))
    shuffled = replace(scene, layers=_indexed(scene, (slice(None), order)))
    expected = scene.positions(scene.select(method))
    return _difference(expected, shuffled.positions(shuffled.select(method)))


def _has_no_memory(method: Method, seed: int) -> str:
    """Another session in between changes nothing; inputs are left as they were."""
    scene = _scene(method, seed)
    copies = [tensor.clone() for tensor in _tensors(scene)]
    first = scene.positions(scene.select(method))
    _scene(method, seed + 1, more=48).select(method)
    problem = _difference(first, scene.positions(scene.select(method)))
    if problem:
        return f"the second call differs: {problem}"
    same = all(torch.equal(a, b) for a, b in zip(copies, _tensors(scene), strict=True))
    return "" if same else "select changed the cache or the queries it was given"


def _tensors(scene: MethodInput) -> list[Tensor]:
    """Return every tensor a method sees."""
    parts: list[Any] = [*scene.layers, *scene.queries, scene]
    found = (getattr(part, field.name) for part in parts for field in fields(part))
    return [each for each in found if isinstance(each, Tensor)]


def _shares_kept_sets(method: Method, seed: int) -> str:
    for kept_set in KEPT_SETS:
        variant = replace(method, kept_set=kept_set)
        scene = _scene(variant, seed)
        kept = scene.positions(scene.select(variant))
        one_layer, one_head = kept[:1].expand_as(kept), kept[:, :1].expand_as(kept)
        if kept_set in ("per_kv_head", "shared") and not torch.equal(kept, one_layer):
            return f"kept_set={kept_set}: layers keep different tokens"
        if kept_set in ("per_layer", "shared") and not torch.equal(kept, one_head):
            return f"kept_set={kept_set}: KV heads keep different tokens"
    return ""


def _works_with_young_rings(method: Method, seed: int) -> str:
    """Keep a full set in a session that has seen one phase only."""
    selection = _scene(method, seed, phases=(int(Phase.OTHERS),)).select(method)
    if problem := _count_problem(method, selection):
        return problem
    return "" if bool((~torch.isnan(selection.scores)).any()) else "all scores are NaN"


def _survives_a_long_prompt(method: Method, seed: int) -> str:
    """Take a first prefill as long as the budget or longer, or refuse it where it is protected."""
    for prompt in (_budget(method), _budget(method) + 8):
        scene = _scene(method, seed, prompt=prompt)
        if not method.has_room(_budget(method), method.protected(prompt, scene.system)):
            try:
                scene.select(method)
            except UsageError:
                continue
            return f"a protected prompt of {prompt} tokens is not refused"
        selection = scene.select(method)
        if problem := _count_problem(method, selection, f" after a first prefill of {prompt}"):
            return problem
    return ""


def _refuses(method: Method, **changes: object) -> str:
    arguments = {"budget": method.budget, "settings": method.settings(), **changes}
    try:
        type(method).create(method.preset, **arguments)  # type: ignore[arg-type]
    except UsageError as error:
        return "" if str(error).strip() and "\n" not in str(error) else "message is not one line"
    return f"{changes} is accepted, expected a UsageError"


def _refuses_bad_budgets(method: Method) -> str:
    always = method.sinks + method.recent_kept(1)
    wrong = (None, 0, -1, "0%", "101%", "many", always)
    return next(filter(None, (_refuses(method, budget=b) for b in wrong)), "")


def _refuses_bad_settings(method: Method) -> str:
    cases = ({"no_such_parameter": "1"}, {"interval": "0"}, {"interval": "x"}, {"trigger": "never"})
    return next(filter(None, (_refuses(method, settings=case) for case in cases)), "")


def _repeats_from_settings(method: Method) -> str:
    again = type(method).create(method.preset, method.budget, method.settings())
    return "" if again == method else f"create(settings()) gives {again}, expected {method}"


def _takes_shares(method: Method) -> str:
    """Take a share of the length too, never below what is always kept."""
    share = type(method).create(method.preset, "25%", method.settings())
    for now in (1, 400, 4001):
        size, least = share.budget_at(now), share.sinks + share.recent_kept(share.budget_at(now))
        if size < -(-now // 4) or size <= least:
            return f"25% of {now} tokens: a budget of {size}, {least} of them always kept"
    return ""


SETTINGS_CHECKS: dict[str, Callable[[Method], str]] = {
    "refuses bad budgets": _refuses_bad_budgets,
    "refuses bad settings": _refuses_bad_settings,
    "its settings rebuild it": _repeats_from_settings,
    "takes a share of the length as a budget": _takes_shares,
}

SELECTION_CHECKS: dict[str, Callable[[Method, int], str]] = {
    "scores fit the cache": _scores_fit,
    "keeps exactly the budget": _keeps_budget,
    "keeps what is always kept": _keeps_always,
    "keeps what is protected": _keeps_protected,
    "keeps all under budget": _keeps_all_under_budget,
    "evicts one token if one is too many": lambda method, seed: _count_problem(
        method, _scene(method, seed, more=1).select(method)
    ),
    "kept set follows scores, ties to the lower position": _follows_scores,
    "constant, zero and huge keys": _survives_extremes,
    "follows a permutation of KV heads": _follows_heads,
    "ignores the order of cache rows": _ignores_cache_order,
    "has no memory and changes nothing": _has_no_memory,
    "kept sets are shared as asked": _shares_kept_sets,
    "works on a device that is not the CPU": _works_on_a_gpu,
    "works before all rings are full": _works_with_young_rings,
    "works after a prompt over the budget": _survives_a_long_prompt,
}
