"""What sessions begin with, kept from one play to the next: a system message is read once.

A play reads its first prompt in chunks of one length, so whole chunks that two sessions have in
common are computed by the same products: going on behind them gives the same bits. Sums of
attention (H2O) are taken as they stood behind each chunk, before later tokens added to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from agentbench_kv.engines.embedded.forward import PREFILL_CHUNK, session_pools
from agentbench_kv.engines.embedded.model import LoadedModel
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.methods.base import Method, Phase, QueryKind, QueryPlan
from agentbench_kv.methods.full import Full

Labelled = Sequence[tuple[int, Phase]]  # token ids with their phases
BEGINNINGS = 4  # that are kept: the rows and all queries of as many prompts


def full_cache(methods: Sequence[Method]) -> Full:
    """Return the full cache that methods start from: with sums, if one of them asks for some."""
    kinds = {method.query_plan().kind for method in methods}
    return _WithSums() if QueryKind.SUMS in kinds else Full()


@dataclass(frozen=True, kw_only=True)
class _WithSums(Full):
    def query_plan(self) -> QueryPlan:
        return QueryPlan(QueryKind.SUMS)


@dataclass(frozen=True)
class Beginning:
    """A full cache at rest, with every query that it was asked."""

    prompt: Labelled  # what it was fed
    session: EmbeddedSession
    queries: Sequence[Tensor]  # of every layer [tokens, heads, head_dim]
    sums: Mapping[int, Tensor]  # by tokens read, behind whole chunks: [layers, kv_heads, tokens]


class Beginnings:
    """The newest beginnings of a model's sessions, and the pools that their rows are in.

    `methods` are all that will start from them. A layer that sees a window has lost what it would
    begin with, so such models have none.
    """

    def __init__(
        self, model: LoadedModel, methods: Sequence[Method] = (), chunk: int = PREFILL_CHUNK
    ) -> None:
        self.base = full_cache(methods)
        self.pools = session_pools(model, self.base)
        self._chunk = chunk
        self._kept: list[Beginning] = []  # the least recently used first

    def find(self, prompt: Labelled) -> tuple[Beginning, int] | None:
        """Return the one with most whole chunks in common with a prompt, and their tokens."""
        found = max(self._kept, key=lambda each: self._common(each, prompt), default=None)
        rows = 0 if found is None else self._common(found, prompt)
        if found is None or not rows:
            return None
        self._kept.remove(found)
        self._kept.append(found)
        return found, rows

    def keep(
        self,
        prompt: Labelled,
        session: EmbeddedSession,
        queries: Callable[[int], Sequence[Tensor]],
        sums: Mapping[int, Tensor],
    ) -> None:
        """Take over a session that was fed a prompt first; what it was fed later is forgotten.

        `queries` gives those of its first rows, `sums` are those behind every chunk.
        """
        rows = self._whole(len(prompt))
        known = any(self._common(each, prompt) == rows for each in self._kept)
        if self.pools.windows is not None or not 0 < rows <= session.fed or known:
            session.free()
            return
        session.rewind(rows)
        new = Beginning(
            prompt[:rows], session, queries(rows), {n: s for n, s in sums.items() if n <= rows}
        )
        left = [each for each in self._kept if self._common(each, prompt) < len(each.prompt)]
        for each in self._kept:
            if each not in left[1 - BEGINNINGS :]:
                each.session.free()
        self._kept = [*left[1 - BEGINNINGS :], new]

    def close(self) -> None:
        """Give all of them up."""
        for each in self._kept:
            each.session.free()
        self._kept.clear()

    def _whole(self, tokens: int) -> int:
        """Return the tokens of a prompt's whole chunks; its last one is always read."""
        return max(0, tokens - 1) // self._chunk * self._chunk

    def _common(self, kept: Beginning, prompt: Labelled) -> int:
        most = min(len(kept.prompt), self._whole(len(prompt)))
        same = next((at for at in range(most) if kept.prompt[at] != prompt[at]), most)
        return same // self._chunk * self._chunk
