"""What a memory brought back in the layer that looks for it.

Each layer of a model brings back its own part of the past, and most bring back whatever they
bring: a mean over layers hardly tells a memory that finds from one that draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentbench_kv.results.records import Metric


def best_layer(
    needed: Sequence[tuple[Mapping[int, Sequence[float]], int]],
    recalled: Sequence[Mapping[int, Sequence[float]]],
    told: int,
) -> dict[str, Metric]:
    """Return what the layer brought back that brought back most of the evidence.

    `needed` has the shares by layer that stood before an answer, with the number of a message that
    the answer needed; `recalled` those before every answer, and `told` is how many messages there
    are. `best_layer_evidence` is that layer's share of what was needed, `best_layer_message` its
    share of any message: what the first would be if it had brought back whatever it liked.
    """
    known = [layers for shares in recalled for layers in shares.values()]
    if not needed or not known:
        return {}
    nothing = [0.0] * len(known[0])
    rows = [shares.get(number, nothing) for shares, number in needed]
    found = [sum(layer) for layer in zip(*rows, strict=True)]
    best = max(range(len(found)), key=found.__getitem__)
    return {
        "best_layer_evidence_right": found[best],
        "best_layer_evidence_asked": len(needed),
        "best_layer_message_right": sum(layers[best] for layers in known),
        "best_layer_message_asked": told * len(recalled),
    }
