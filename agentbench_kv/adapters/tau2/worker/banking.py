"""The domain `banking_knowledge` of v1.0.1: what is made once for all simulations, and per task."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tau2.domains.banking_knowledge import environment, retrieval
from tau2.domains.banking_knowledge.data_model import KnowledgeBase
from tau2.knowledge.pipeline import RetrievalPipeline, RetrievalResult, RetrievalTiming
from tau2.runner.build import _derive_read_log_allowlist as required_reads

from .simulation import Domain

if TYPE_CHECKING:
    from agentbench_kv.adapters.worker_child import WorkerRequest

_INDEXES = ("create_bm25_retrieval_pipeline", "create_grep_retrieval_pipeline")


class Banking(Domain):
    """The domain with one of its configurations of retrieval.

    A simulation and its check make four environments, each of which would read 698 documents and
    index them again; nothing changes documents or indexes, so all share one.
    """

    def __init__(self, configuration: str) -> None:
        documents = environment.get_knowledge_base().documents
        # The benchmark takes them in the order of the file system, which differs by machine.
        knowledge = KnowledgeBase(documents=dict(sorted(documents.items())))
        environment.get_knowledge_base = lambda: knowledge
        for name in _INDEXES:
            setattr(retrieval, name, _made_once(getattr(retrieval, name)))
        RetrievalPipeline.retrieve = _untimed(RetrievalPipeline.retrieve)
        self._configuration, self._documents = configuration, len(documents)
        super().__init__("banking_knowledge")

    def about(self, request: WorkerRequest) -> dict[str, Any]:
        return {
            **super().about(request),
            "documents": len(environment.get_knowledge_base().documents),
        }

    def options(self, task: Any) -> dict[str, Any]:
        configured = {"retrieval_variant": self._configuration, "task": task}
        return {**configured, "read_log_allowlist": required_reads(task) if task else set()}

    def user_tools(self, made: Any, task: Any) -> list[Any] | None:
        return made.get_user_tools(include=task.user_tools) or None


def _made_once(build: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[str, Any] = {}

    def kept(knowledge_base: KnowledgeBase, **options: Any) -> Any:
        key = repr(options)
        if key not in made:
            made[key] = build(knowledge_base, **options)
        return made[key]

    return kept


def _untimed(retrieve: Callable[..., Any]) -> Callable[..., Any]:
    """Let every search say that it took 0 ms.

    The benchmark writes the time into what the agent reads, so no session would be the same twice.
    """

    def retrieved(*args: Any, **options: Any) -> Any:
        found = retrieve(*args, **options)
        if isinstance(found, RetrievalResult):
            found.timing = RetrievalTiming()
        return found

    return retrieved
