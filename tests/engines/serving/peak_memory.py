"""How much memory a piece of work takes on the CPU, counted by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that a piece of work holds at a time, beside what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    held = most = 0
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
