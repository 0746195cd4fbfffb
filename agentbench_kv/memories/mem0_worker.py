"""Mem0 in its own environment: a bank's files are opened for every request.

Standard library and Mem0 only: the environment does not have agentbench_kv.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from .files import ANSWER_S, SESSION_HEADER, is_models_doing, versions

_USER = "past"  # one for a bank: who said what stands in the texts


def setup(_: Any) -> dict[str, Callable[[Any], Any]]:
    import mem0  # noqa: F401  before the processes of the requests are forked

    return {"add": add, "search": search, "versions": versions}


def add(request: Any) -> dict[str, Any]:
    """Tell a bank messages; say what failed if the model did not answer as it was asked to."""
    from mem0.exceptions import LLMError

    args = request.args
    told = [{"role": each["role"], "content": each["content"]} for each in args["messages"]]
    memory, said = _opened(args), _Errors()
    logging.getLogger("mem0").addHandler(said)
    try:
        about = {"metadata": {"messages": args["numbers"]}, "prompt": _dated(args["when"])}
        memory.add(told, user_id=_USER, **about)
    except LLMError as error:
        if not is_models_doing(error.__cause__):
            raise
        return {"failed": f"{type(error).__name__}: {error}"}
    # An answer that it cannot read is nothing to it but a line in its log.
    return {"failed": "; ".join(said.lines)}


def _dated(when: str | None) -> str | None:
    """Return what the package is to know of a past session's time: it takes all for today's."""
    if when is None:
        return None
    time = datetime.fromisoformat(when)
    return (
        f"The new messages were written on {time:%d %B %Y} at {time:%H:%M}. This is their "
        "observation date: resolve every relative date by it, and by no other date given here."
    )


class _Errors(logging.Handler):
    """What the package logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def search(request: Any) -> list[dict[str, Any]]:
    """Return the memories nearest to a query, best first."""
    args = request.args
    found = _opened(args).search(args["query"], filters={"user_id": _USER}, top_k=args["topk"])
    return [
        {"text": each["memory"], "messages": each["metadata"]["messages"]}
        for each in found["results"]
    ]


def _opened(args: dict[str, Any]) -> Any:
    """Return a bank's memory, whose model and encoder are the server's."""
    from mem0 import Memory

    folder = Path(args["folder"])
    folder.mkdir(exist_ok=True)
    server = {"openai_base_url": args["url"], "api_key": "none"}
    writes = {"temperature": 0.0, "max_tokens": args["write_tokens"]}
    store = {"path": f"{folder}/store", "embedding_model_dims": args["size"], "on_disk": True}
    config = {
        "llm": {"provider": "openai", "config": {"model": args["model"], **writes, **server}},
        "embedder": {"provider": "openai", "config": {"model": args["encoder"], **server}},
        "vector_store": {"provider": "qdrant", "config": store},
        "history_db_path": f"{folder}/history.db",
    }
    memory = Memory.from_config(config)
    named = {SESSION_HEADER: args["session"]}
    memory.llm.client = memory.llm.client.with_options(default_headers=named, timeout=ANSWER_S)
    return memory
