"""Graphiti in its own environment: a bank's graph, a file, is opened for every request.

Standard library and graphiti only: the environment does not have agentbench_kv.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .files import ANSWER_S, SESSION_HEADER, is_models_doing, versions

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)  # of a session that says not when it was


def setup(_: Any) -> dict[str, Callable[[Any], Any]]:
    # Before the processes of the requests are forked.
    import graphiti_core.driver.kuzu_driver
    import graphiti_core.embedder.openai
    import graphiti_core.llm_client.openai_generic_client
    import graphiti_core.search.search_config_recipes  # noqa: F401

    return {"add": add, "search": search, "versions": versions}


def add(request: Any) -> dict[str, Any]:
    """Tell a bank messages as an episode; say what failed if the model's answers were of no use."""
    from graphiti_core.llm_client.errors import RateLimitError

    args = request.args
    try:
        asyncio.run(_added(args))
    except RateLimitError:
        raise
    except Exception as error:  # it stumbles over answers in many ways
        if not is_models_doing(error):
            raise
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"failed": ""}


def search(request: Any) -> list[dict[str, Any]]:
    """Return facts, then entities with their summaries, best first in each."""
    return asyncio.run(_found(request.args))


async def _added(args: dict[str, Any]) -> None:
    graph = await _opened(args)
    when = datetime.fromisoformat(args["when"]).replace(tzinfo=UTC) if args["when"] else _NEVER
    said = "\n".join(each["content"] for each in args["messages"])
    made = await graph.add_episode(
        name=f"messages {args['numbers'][0]} to {args['numbers'][-1]}",
        episode_body=said,
        source_description="conversation",
        reference_time=when,
    )
    with (Path(args["folder"]) / "episodes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps([made.episode.uuid, args["numbers"]]) + "\n")


async def _found(args: dict[str, Any]) -> list[dict[str, Any]]:
    from graphiti_core.search.search_config_recipes import COMBINED_HYBRID_SEARCH_RRF

    graph = await _opened(args)
    wanted = COMBINED_HYBRID_SEARCH_RRF.model_copy(
        update={"limit": args["topk"], "episode_config": None, "community_config": None}
    )
    # The store's word search takes `?` and `*` for wildcards: a question would find nothing.
    words = " ".join(re.findall(r"\w+", args["query"]))
    found = await graph.search_(words, config=wanted)
    told = _episodes(Path(args["folder"]))
    facts = [
        {
            "text": f"{each.fact}{_period(each)}",
            "messages": sorted({n for id in each.episodes for n in told.get(id, [])}),
        }
        for each in found.edges
    ]
    entities: list[dict[str, Any]] = [
        {"text": f"{each.name}: {each.summary}" if each.summary else each.name, "messages": []}
        for each in found.nodes
    ]
    return facts + entities


def _period(edge: Any) -> str:
    """Say when a fact held, as far as the graph knows."""
    known = [
        f"{word} {when.date().isoformat()}"
        for word, when in (("from", edge.valid_at), ("until", edge.invalid_at))
        if when is not None
    ]
    return f" ({' '.join(known)})" if known else ""


def _episodes(folder: Path) -> dict[str, list[int]]:
    """Return which messages each episode holds."""
    try:
        lines = (folder / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return dict(json.loads(line) for line in lines)


async def _opened(args: dict[str, Any]) -> Any:
    """Return a bank's graph, whose model and encoder are the server's."""
    import openai
    from graphiti_core import Graphiti
    from graphiti_core.cross_encoder.client import CrossEncoderClient
    from graphiti_core.driver.kuzu_driver import KuzuDriver
    from graphiti_core.embedder.openai import OpenAIEmbedder, OpenAIEmbedderConfig
    from graphiti_core.graph_queries import get_fulltext_indices
    from graphiti_core.llm_client.config import LLMConfig
    from graphiti_core.llm_client.openai_generic_client import OpenAIGenericClient

    class NoReranker(CrossEncoderClient):  # type: ignore[misc]
        """Its own asks a hosted model for every candidate; ranks are fused without it."""

        async def rank(self, query: str, passages: list[str]) -> list[tuple[str, float]]:
            raise NotImplementedError

    folder = Path(args["folder"])
    indexed = folder / "indexed"
    if not indexed.exists():  # new, or left behind half made
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        driver = KuzuDriver(str(folder / "graph"))
    if not indexed.exists():
        # The driver makes no index itself, and search needs them.
        for query in get_fulltext_indices(driver.provider):
            await driver.execute_query(query)
        indexed.touch()
    server = {"base_url": args["url"], "api_key": "none"}
    named = {SESSION_HEADER: args["session"]}
    client = openai.AsyncOpenAI(**server, default_headers=named, timeout=ANSWER_S)
    model = LLMConfig(model=args["model"], small_model=args["model"], temperature=0.0, **server)
    encoder = OpenAIEmbedderConfig(
        embedding_model=args["encoder"], embedding_dim=args["size"], **server
    )
    return Graphiti(
        graph_driver=driver,
        llm_client=OpenAIGenericClient(model, client=client, max_tokens=args["write_tokens"]),
        embedder=OpenAIEmbedder(encoder),
        cross_encoder=NoReranker(),
    )
