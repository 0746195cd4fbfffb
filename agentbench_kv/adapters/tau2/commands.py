"""What the tau2 worker answers."""

from __future__ import annotations

import importlib.metadata
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .scripts import script
from .simulation import Domain, play

if TYPE_CHECKING:
    from agentbench_kv.adapters.worker_child import Request


class Benchmark:
    """One domain and its commands."""

    def __init__(self, domain: str) -> None:
        self._domain = Domain(domain)

    def about(self, _: Request) -> dict[str, Any]:
        """Return versions and the size of what every prompt begins with."""
        return {
            "tau2": importlib.metadata.version("tau2"),
            "domain": self._domain.name,
            "policy_characters": len(self._domain.policy),
            "tools": len(self._domain.tools),
        }

    def samples(self, _: Request) -> list[str]:
        return list(self._domain.tasks)

    def script(self, request: Request) -> list[str]:
        wanted = self._domain.tasks[request.args["sample"]].evaluation_criteria
        return script(request.args["agent"], wanted.actions or [], wanted.communicate_info or [])

    def run(self, request: Request) -> dict[str, Any]:
        judge = request.args["judge"]
        for url in (request.args["endpoint"], request.args["user"]["url"], judge and judge["url"]):
            if url:
                parts = urlsplit(url)
                port = parts.port or (443 if parts.scheme == "https" else 80)
                request.guard.allow(str(parts.hostname), port)
        if judge:
            # Only v1.x has what it replaces.
            from .judging import appoint

            appoint(judge)
        played = play(self._domain, request.args, request.cancelled)
        plain: dict[str, Any] = json.loads(json.dumps(played, default=str))
        return plain
