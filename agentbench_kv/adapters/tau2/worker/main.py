"""The tau2 worker's entry; runs in the tau2 environment under `worker_child`."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Else litellm fetches a price list from the network when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
# What each release says of itself.
SUMMARIES = {
    "0.2.1.dev0": "The tau2 package",
    "1.0.1": "tau-bench: Benchmarking tool-agent-user interaction in real-world domains",
}


class WrongPackageError(Exception):
    """What is installed as tau2 is not the tau2-bench that is wanted."""


def require_tau2_bench(version: str) -> None:
    """Refuse another project of that name, and another release; importing would prove nothing."""
    try:
        about = importlib.metadata.metadata("tau2")
        summary, found = about["Summary"], about["Version"]
    except importlib.metadata.PackageNotFoundError:
        summary, found = "nothing", ""
    if summary not in SUMMARIES.values():
        raise WrongPackageError(f"the tau2 installed here is not tau2-bench but: {summary}")
    if (found, summary) != (version, SUMMARIES[version]):
        raise WrongPackageError(f"tau2-bench {found} is installed here, these tasks need {version}")


def setup(guard: Any) -> dict[str, Callable[[Any], Any]]:
    """Load the domain, then close the doors; litellm opens its own to providers it knows."""
    require_tau2_bench(os.environ["KVBENCH_TAU2_VERSION"])
    from loguru import logger

    logger.remove()  # it writes several lines a step
    from .commands import Benchmark, keep_parsed

    keep_parsed()
    benchmark = Benchmark(os.environ["KVBENCH_TAU2_DOMAIN"])
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if os.environ["KVBENCH_TAU2_NETWORK"] == "named":
        guard.install()
    return {name: getattr(benchmark, name) for name in ("about", "samples", "script", "run")}
