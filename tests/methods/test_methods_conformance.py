"""The conformance suite on third-party classes: it accepts a correct one and finds broken ones."""

# ruff: noqa: ARG002  plug-in methods below have the contract's arguments

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from agentbench_kv.analysis.replay import MethodInput
from agentbench_kv.conformance.methods import check_method
from agentbench_kv.conformance.scenes import make_scene
from agentbench_kv.methods.base import LayerView, Method
from agentbench_kv.params import param
from agentbench_kv.registry import make_method


@dataclass(frozen=True, kw_only=True)
class ByPosition(Method):
    """A correct little method, to be broken below."""

    name: ClassVar[str] = "by-position"

    def score(self, queries, keys, context):
        return context.positions.float()


class WrongShape(ByPosition):
    def score(self, queries, keys, context):
        return context.positions.float()[:, :-1]


class GivesNaN(ByPosition):
    def score(self, queries, keys, context):
        return keys.sum(-1) / keys.std(1, correction=0).sum(-1, keepdim=True)


class MixesHeads(ByPosition):
    def score(self, queries, keys, context):
        return keys.sum(-1) * torch.arange(1, 3)[:, None] - 3 * keys[:1, :, 0]


class DependsOnCacheOrder(ByPosition):
    ordered: ClassVar[bool] = False

    def score(self, queries, keys, context):
        return torch.arange(keys.shape[1]).float().expand(keys.shape[:2])


class Remembers(ByPosition):
    calls: ClassVar[list[int]] = []

    def score(self, queries, keys, context):
        self.calls.append(1)
        return torch.sin(context.positions * float(len(self.calls)))


class WritesKeys(ByPosition):
    ordered: ClassVar[bool] = False

    def score(self, queries, keys, context):
        return keys.add_(1.0).sum(-1)


class StaysOnTheCpu(ByPosition):
    def score(self, queries, keys, context):
        return keys @ torch.ones(8, 1)[..., 0]


class KeepsTooMany(ByPosition):
    def select(self, layers, queries, now, prompt=0, phases=None):
        return replace(self, budget=self.budget + 1)._plain(layers, queries, now)

    def _plain(self, layers, queries, now, prompt=0, phases=None):
        return Method.select(self, layers, queries, now)


class ForgetsRecent(ByPosition):
    def score(self, queries, keys, context):
        return -context.positions.float()

    def _always(self, positions, now, prompt):
        return torch.zeros_like(positions, dtype=torch.bool)


class Raises(ByPosition):
    def score(self, queries, keys, context):
        raise ZeroDivisionError("boom")


class NeedsTwo(ByPosition):
    """Cannot evict a single token."""

    def score(self, queries, keys, context):
        spare = keys.shape[1] - self.budget
        return context.positions.float() + torch.ones(spare - 1).argmin()


class FearsLongPrompts(ByPosition):
    def score(self, queries, keys, context):
        assert context.prompt < context.budget
        return context.positions.float()


class GivesUpKeptTokens(ByPosition):
    """Forgets a token of its own that it says no event may evict."""

    def _always(self, positions, now, protected):
        return (positions == 0) & (len(positions) == 1)  # in words, not in a cache of two layers


class EvictsProtected(ByPosition):
    def _always(self, positions, now, protected):
        return super()._always(positions, now, protected - 1)


class TakesNoShare(ByPosition):
    def budget_at(self, now):
        return self.budget or 1


class LooksAtPhases(ByPosition):
    """Not wrong: a method may; but it must do without a phase that never occurs."""

    def score(self, queries, keys, context):
        tool = context.phases == 2
        first = torch.where(tool, context.positions, 10**6).amin(-1, keepdim=True)
        return torch.where(first < 10**6, context.positions.float(), torch.nan)


class IgnoresScores(ByPosition):
    """Keeps the first rows, whatever it scored."""

    def select(self, layers, queries, now, prompt=0, phases=None):
        selection = super().select(layers, queries, now, prompt, phases)
        rows = torch.arange(selection.kept.shape[-1]).expand_as(selection.kept)
        return replace(selection, kept=rows.contiguous())


class AlwaysEvicts(ByPosition):
    def select(self, layers, queries, now, prompt=0, phases=None):
        selection = super().select(layers, queries, now, prompt, phases)
        few = layers[0].positions.shape[-1] <= self.budget
        return replace(selection, kept=selection.kept[..., few:])


class NeverShares(ByPosition):
    def score(self, queries, keys, context):
        return keys.sum(-1)

    def _merge(self, scores):
        return scores


class TakesAnyBudget(ByPosition):
    def validate(self):
        pass


class TakesAnySetting(ByPosition):
    @classmethod
    def create(cls, preset, budget, settings=None):
        known = {key: value for key, value in (settings or {}).items() if key == "sinks"}
        return super().create(preset, budget, known)


@dataclass(frozen=True, kw_only=True)
class HidesASetting(ByPosition):
    sinks: int = param(4, "first tokens")

    def settings(self):
        return {**super().settings(), "sinks": 0}


def test_conformance_accepts_a_correct_class():
    assert [result for result in check_method(ByPosition) if not result.ok] == []


@pytest.mark.parametrize(
    ("cls", "check"),
    [
        (WrongShape, "scores fit the cache"),
        (GivesNaN, "constant, zero and huge keys"),
        (MixesHeads, "follows a permutation of KV heads"),
        (DependsOnCacheOrder, "ignores the order of cache rows"),
        (Remembers, "has no memory and changes nothing"),
        (WritesKeys, "has no memory and changes nothing"),
        (KeepsTooMany, "keeps exactly the budget"),
        (Raises, "scores fit the cache"),
        (IgnoresScores, "kept set follows scores, ties to the lower position"),
        (AlwaysEvicts, "keeps all under budget"),
        (NeverShares, "kept sets are shared as asked"),
        (TakesAnyBudget, "refuses bad budgets"),
        (TakesAnySetting, "refuses bad settings"),
        (HidesASetting, "its settings rebuild it"),
        (NeedsTwo, "evicts one token if one is too many"),
        (FearsLongPrompts, "works after a prompt over the budget"),
        (GivesUpKeptTokens, "keeps what is always kept"),
        (EvictsProtected, "keeps what is protected"),
        (TakesNoShare, "takes a share of the length as a budget"),
        (LooksAtPhases, "works before all rings are full"),
        (StaysOnTheCpu, "works on a device that is not the CPU"),
    ],
)
def test_conformance_finds_a_broken_method(cls, check):
    results = {result.name: result for result in check_method(cls, 16)}
    assert not results[check].ok
    assert results[check].detail


def test_every_check_of_the_suite_can_fail():
    """A check that no broken class above fails would say nothing."""
    broken = parametrised(test_conformance_finds_a_broken_method)
    assert {name for _, name in broken} == {result.name for result in check_method(ByPosition)}


def parametrised(test):
    (mark,) = test.pytestmark
    return mark.args[1]


def test_conformance_finds_an_evicted_recent_token():
    method = ForgetsRecent(budget=16, keep_recent=4)
    results = {result.name: result for result in check_method(method)}
    assert not results["keeps what is always kept"].ok


def test_scene_holds_what_a_method_always_keeps():
    method = make_method("snapkv@rkv", 64, {"sinks": 2})
    scene = make_scene(method, 80, seed=3)
    assert isinstance(scene, MethodInput)
    for view in scene.layers:
        assert isinstance(view, LayerView)
        for head in view.positions.tolist():
            assert {0, 1, *range(scene.now - 32, scene.now)} <= set(head)
            assert len(set(head)) == 80
            assert head != sorted(head)
