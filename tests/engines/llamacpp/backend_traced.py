"""The backend, as shipped, while it writes down its logits and the rows that spans leave.

One JSON object a line, to the file that `TRACE` names: `position` and `logits` [vocabulary] for
every token sampled; `fed`, `restored` and `rows` (logical positions in the order of the cache)
whenever spans have left or come back.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from agentbench_kv.engines.llamacpp.server.app import SpanCommands, main
from agentbench_kv.engines.llamacpp.server.scheduler import BatchScheduler

TRACE = "KVBENCH_TEST_TRACE"


def write(document: dict[str, Any]) -> None:
    with Path(os.environ[TRACE]).open("a") as file:
        file.write(json.dumps(document) + "\n")


def trace_logits() -> None:
    advance = BatchScheduler._advance

    def traced(self: Any, generation: Any, logits: Any) -> None:
        write({"position": len(generation.session.tokens), "logits": logits.tolist()})
        advance(self, generation, logits)

    BatchScheduler._advance = traced  # type: ignore[method-assign]


def trace_rows(name: str) -> None:
    change = getattr(SpanCommands, name)

    def traced(self: Any, session: str, *arguments: Any) -> Any:
        answer = change(self, session, *arguments)
        state = self._scheduler.sessions[session]
        rows = state.rows.logical.tolist()
        write({"fed": state.ledger.fed, "restored": name == "restore", "rows": rows})
        return answer

    setattr(SpanCommands, name, traced)


if __name__ == "__main__":
    trace_logits()
    trace_rows("evict")
    trace_rows("restore")
    raise SystemExit(main())
