"""t-SNE: the sample, the seed, and phases that lie apart."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from agentbench_kv.analysis import tsne
from agentbench_kv.analysis.tsne import embed_queries
from agentbench_kv.errors import PrerequisiteError, UsageError


def clustered(capture, spread):
    """Four phases of 12 tokens, each around a corner of its own in head 1, none in head 0."""
    phases = np.arange(48) % 4
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 48, 8)).astype("f4")
    q[1] += spread * np.eye(8, dtype="f4")[phases]
    return capture(48, q_heads=2, kv_heads=1, extra={"q": q, "phase": phases})


def silhouette(vectors, phases):
    """By the definition: (b - a) / max(a, b), mean over points."""
    distances = np.linalg.norm(vectors[:, None] - vectors[None], axis=-1)
    values = []
    for i, own in enumerate(phases):
        others = np.arange(len(phases)) != i
        near = distances[i][(phases == own) & others].mean()
        far = min(distances[i][phases == p].mean() for p in set(phases) - {own})
        values.append((far - near) / max(near, far))
    return np.mean(values)


def test_separate_phases_are_separate_in_the_plane(capture):
    apart, mixed = embed_queries(clustered(capture, 50.0), [(0, 1), (0, 0)])
    phases = np.arange(48) % 4
    assert apart.positions.tolist() == list(range(48))
    assert apart.phases.tolist() == phases.tolist()
    points = apart.points.numpy()
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert np.array_equal(phases[distances.argmin(-1)], phases)
    assert apart.silhouette > 0.8
    assert abs(mixed.silhouette) < 0.1


def test_silhouette_is_that_of_the_queries(capture):
    made = clustered(capture, 2.0)
    (found,) = embed_queries(made, [(0, 1)])
    expected = silhouette(made.q[0, 1].numpy().astype("f8"), np.arange(48) % 4)
    assert found.silhouette == pytest.approx(expected, rel=1e-4)


def test_equal_seeds_give_equal_pictures(capture):
    made = clustered(capture, 3.0)
    first, again, other = (
        embed_queries(made, [(0, 1)], per_phase=6, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first.points, again.points)
    assert first.positions.tolist() != other.positions.tolist()
    assert [int((first.phases == phase).sum()) for phase in range(4)] == [6, 6, 6, 6]
    assert first.positions.tolist() == sorted(first.positions.tolist())
    json.dumps(first.document(), allow_nan=False)


def test_one_phase_has_no_silhouette(capture):
    made = capture(20, extra={"phase": np.full(20, 3)})
    assert embed_queries(made, [(0, 0)])[0].silhouette is None


@pytest.mark.parametrize("place", [(1, 0), (0, 4), (0, -1)])
def test_a_head_that_is_not_there(capture, place):
    with pytest.raises(UsageError, match="the capture has layers 0 to 0 and query heads 0 to 3"):
        embed_queries(capture(20), [place])


def test_too_few_queries(capture):
    with pytest.raises(UsageError, match="tsne needs at least 8 queries; the sample has 4"):
        embed_queries(clustered(capture, 1.0), [(0, 0)], per_phase=1)


def test_without_scikit_learn(capture, monkeypatch):
    monkeypatch.setattr(tsne, "find_spec", lambda _: None)
    with pytest.raises(PrerequisiteError, match=r"tsne needs scikit-learn, .*\[analysis\]"):
        embed_queries(capture(20), [(0, 0)])
