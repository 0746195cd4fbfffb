"""How close a decision was: a run's session played again, and its logits read off the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentbench_kv.conformance.engines.models import load_network
from agentbench_kv.conformance.masked_reference import cache_heads, reference_logits, visible
from agentbench_kv.conformance.tracing import Event, Trace
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.engines.embedded.recording import EventLog
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.views import Selection
from agentbench_kv.spec import RunSpec

Outputs = tuple[tuple[int, ...], ...]


def decision_gap(
    spec: RunSpec, sample: str, turn: int, index: int, tokens: Sequence[int | None]
) -> float:
    """Return how far apart the logits of two tokens are where two engines diverged.

    `tokens` are the embedded engine's choice and the other's for token `index` of generation
    `turn`. The sample is played again on the embedded engine, greedily; the reference reads what
    came before the token, blind to what was evicted. UsageError if the session cannot be repeated.
    """
    mine, theirs = tokens
    if spec.temperature or mine is None or theirs is None:
        raise UsageError("one engine ended there, or the tokens were drawn at random")
    trace, outputs = _play(replace(spec, engine="embedded", engine_args={}), sample)
    if turn >= len(outputs) or index >= len(outputs[turn]) or outputs[turn][index] != mine:
        raise UsageError("played again, the embedded engine chose another token")
    number = sum(map(len, outputs[:turn])) + index
    # The session's last token was never fed.
    position = [*trace.decoded_at, len(trace.tokens)][number]
    prefix = Trace(
        tokens=[*trace.tokens[:position], mine],
        events=[event for event in trace.events if event.logical < position],
    )
    network = load_network(model_path(spec.model))
    allowed = visible(prefix, network.config.num_hidden_layers, cache_heads(network, prefix))
    method = spec.make_method()
    row = reference_logits(network, prefix.tokens[:-1], allowed, positions=method.positions)[-1]
    return float(row[mine] - row[theirs])


def _play(spec: RunSpec, sample: str) -> tuple[Trace, Outputs]:
    """Play a sample's first trial; return ids with events, and the ids of every generation."""
    from agentbench_kv.observe import watch

    events: list[Event] = []

    def keep(logical: int, positions: Tensor, selection: Selection) -> None:
        events.append(Event(logical, positions.gather(-1, selection.kept).cpu()))

    log = EventLog(keep)
    watched = watch(spec, sample, log)
    if watched.played.report.resets:
        raise UsageError("the session was started over on the way")
    decoded_at = torch.tensor(log.decoded).nonzero()[:, 0].tolist()
    trace = Trace([int(token) for token in log.tokens], decoded_at=decoded_at, events=events)
    return trace, watched.played.report.outputs
