"""t-SNE of query vectors, coloured by phase (AgentKV, figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentbench_kv.analysis.angles import listed
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.base import PHASE_NAMES, Phase

_PACKAGES = {"matplotlib": ("plots need", "matplotlib"), "sklearn": ("tsne needs", "scikit-learn")}
PER_PHASE = 100
PERPLEXITY = 30.0
_FEWEST = 8


@dataclass(frozen=True)
class Embedding:
    """Queries of one head in the plane."""

    layer: int
    head: int  # query head
    points: Tensor  # [n, 2]
    phases: Tensor  # [n]
    positions: Tensor  # [n]
    divergence: float  # Kullback-Leibler divergence that t-SNE ended at
    # Of the phases in the space of the queries, not in the plane: 1 for phases far apart, 0 for
    # phases that overlap; None with a single phase.
    silhouette: float | None

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "layer": self.layer,
            "head": self.head,
            "divergence": self.divergence,
            "silhouette": self.silhouette,
            "points": listed(self.points),
            "phase": [PHASE_NAMES[phase] for phase in self.phases.tolist()],
            "position": self.positions.tolist(),
        }


def embed_queries(
    capture: Capture,
    places: Sequence[tuple[int, int]],
    *,
    per_phase: int = PER_PHASE,
    seed: int = 0,
) -> list[Embedding]:
    """Embed a sample of the queries of some heads; equal seeds give equal samples.

    `places` are pairs of layer and query head; `per_phase` queries are drawn of each phase, all if
    there are fewer. UsageError if there is no such head, or too few tokens; PrerequisiteError
    without scikit-learn.
    """
    need("sklearn")
    rows = _sample(capture.labels("tsne"), per_phase, seed)
    for layer, head in places:
        if not (0 <= layer < capture.layers and 0 <= head < capture.q_heads):
            raise UsageError(
                f"layer {layer}, head {head}: the capture has layers 0 to {capture.layers - 1} "
                f"and query heads 0 to {capture.q_heads - 1}"
            )
    return [_embed(capture, layer, head, rows, seed) for layer, head in places]


def _sample(phases: Tensor, per_phase: int, seed: int) -> Tensor:
    """Draw tokens of every phase, ascending."""
    generator = np.random.default_rng(seed)
    drawn = []
    for phase in Phase:
        rows = (phases == int(phase)).nonzero()[:, 0].numpy()
        drawn.append(generator.permutation(rows)[:per_phase])
    rows = np.sort(np.concatenate(drawn))
    if len(rows) < _FEWEST:
        raise UsageError(f"tsne needs at least {_FEWEST} queries; the sample has {len(rows)}")
    return torch.from_numpy(rows)


def _embed(capture: Capture, layer: int, head: int, rows: Tensor, seed: int) -> Embedding:
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    vectors = capture.q[layer, head][rows].float().numpy()
    perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
    # scikit-learn takes 32 bits of a seed.
    model = TSNE(perplexity=perplexity, init="pca", random_state=seed % 2**32, n_jobs=1)
    points = torch.from_numpy(model.fit_transform(vectors))
    phases = capture.labels("tsne")[rows]
    silhouette = None
    if 2 <= len(set(phases.tolist())) < len(phases):
        silhouette = float(silhouette_score(vectors, phases.numpy()))
    places, divergence = capture.positions[rows], float(model.kl_divergence_)
    return Embedding(layer, head, points, phases, places, divergence, silhouette)


def need(module: str) -> None:
    """Raise a PrerequisiteError with the command to install a package that is absent."""
    if find_spec(module) is None:
        purpose, package = _PACKAGES[module]
        raise PrerequisiteError(
            f"{purpose} {package}, from the extra [analysis]: in the clone, pip install "
            f'".[analysis]"; elsewhere, pip install {package}'
        )
