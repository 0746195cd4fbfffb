"""The tau2 worker's entry, and its scripted agents; nothing of tau2 is imported before `setup`."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...agent_client import NULL_SENTENCE, call_text, think_block

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
    from .patches import keep_parsed
    from .simulation import Domain

    keep_parsed()
    if retrieval := os.environ.get("KVBENCH_TAU2_RETRIEVAL"):
        from .banking import Banking

        domain: Domain = Banking(retrieval)
    else:
        domain = Domain(os.environ["KVBENCH_TAU2_DOMAIN"])
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    any_network = os.environ["KVBENCH_TAU2_NETWORK"] == "any"
    guard.install(os.environ["TAU2_DATA_DIR"], Path.cwd(), any_network=any_network)

    def scripted(request: Any) -> list[str]:
        wanted = domain.criteria(request.args["sample"])
        return script(request.args["agent"], wanted.actions or [], wanted.communicate_info or [])

    answered = {name: getattr(domain, name) for name in ("about", "samples", "run")}
    return {**answered, "script": scripted}


def script(agent: str, actions: Sequence[Any], communicate: Sequence[str]) -> list[str]:
    """Write the texts that `agent` says, one per answer.

    `gold` plays the golden actions and says what the user has to be told (`communicate`),
    `corrupt` leaves out the last action, `null` says one sentence and calls nothing.
    """
    if agent == "null":
        return [NULL_SENTENCE]
    kept = actions[:-1] if agent == "corrupt" else actions
    return [*map(_say, kept), " ".join(["All done.", *communicate])]


def _say(action: Any) -> str:
    asked = f"Please perform {action.name}."
    by_user = action.requestor == "user"
    said = asked if by_user else call_text(action.name, action.arguments)
    return think_block(f"The next step is {action.name}.") + said
