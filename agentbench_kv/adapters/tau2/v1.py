"""tau2-bench v1.0.1: the domains of v0.2.0 with other task texts, and a judge in one of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from agentbench_kv.adapters.browser.judge import KEY_VARIABLE, Judge
from agentbench_kv.adapters.tau2.releases import V1, Release
from agentbench_kv.adapters.tau2.task import Simulations, base_url, require_server
from agentbench_kv.errors import UsageError
from agentbench_kv.params import param

SCRIPTED = "scripted"


@dataclass(kw_only=True)
class SimulationsV1(Simulations):
    """A domain of v1.0.1."""

    release: ClassVar[Release] = V1
    # Whether some tasks demand that a model finds assertions about the conversation true.
    judged: ClassVar[bool] = False

    judge: str = param(
        SCRIPTED,
        "who judges assertions about the conversation (retail): URL|MODEL of an "
        "OpenAI-compatible server, or scripted (agrees to everything; for tests)",
    )

    def provenance(self) -> dict[str, Any]:
        return {**super().provenance(), "judge": self.judge if self.judged else "none is asked"}

    def _require_partners(self) -> None:
        super()._require_partners()
        if not self.judged:
            return
        if self.judge != SCRIPTED:
            require_server(Judge.parse(self.judge).endpoint, "judge", "judge='URL|MODEL'")
        elif self.user != SCRIPTED:
            raise UsageError(
                f"{self.name} asks a model whether the agent said what it had to, and "
                "judge=scripted agrees to everything: --set judge='URL|MODEL'"
            )

    def _judge_arguments(self) -> dict[str, Any]:
        if self.judge == SCRIPTED or not self.judged:
            return {"kind": SCRIPTED, "url": None, "model": "", "key": None}
        judge = Judge.parse(self.judge)
        key = os.environ.get(KEY_VARIABLE)
        return {"kind": "llm", "url": base_url(judge.endpoint), "model": judge.model, "key": key}


class AirlineV1(SimulationsV1):
    """50 simulations."""

    name = "tau2-v1/airline"
    summary = "tau2-bench v1.0.1, airline: 50 simulations; not tau2/airline"
    domain = "airline"


class RetailV1(SimulationsV1):
    """114 simulations, 40 of them judged by a model as well."""

    name = "tau2-v1/retail"
    summary = "tau2-bench v1.0.1, retail: 114 simulations, a judge; not tau2/retail"
    domain = "retail"
    judged = True


class TelecomV1(SimulationsV1):
    """114 simulations in which the user has tools, too."""

    name = "tau2-v1/telecom"
    summary = "tau2-bench v1.0.1, telecom: 114 simulations; not tau2/telecom"
    domain = "telecom"
    corrupt_score = 0.0
