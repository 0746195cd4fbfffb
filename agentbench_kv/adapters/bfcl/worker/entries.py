"""The samples of one official category, and what each needs before it can be played."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Category:
    """A loaded category: samples and memory's prerequisite conversations by id."""

    name: str  # official, such as `multi_turn_base`
    entries: dict[str, dict[str, Any]]
    truth: dict[str, dict[str, Any]]  # by sample id, in the official order

    @classmethod
    def of(
        cls, name: str, entries: Iterable[dict[str, Any]], truth: Iterable[dict[str, Any]]
    ) -> Category:
        """Match samples and ground truth; the agentic categories share files of other ids."""
        kind = kind_of(name)
        shared = name if kind == "multi_turn" else kind
        renamed = {each["id"].replace(shared, name, 1): each for each in truth}
        return cls(name, {each["id"]: each for each in entries}, renamed)

    @property
    def kind(self) -> str:
        """`multi_turn`, `web_search` or `memory`."""
        return kind_of(self.name)

    def files(self) -> list[str]:
        """Return the data files, relative to the benchmark's data folder."""
        name = f"BFCL_v4_{self.name if self.kind == 'multi_turn' else self.kind}.json"
        scenarios = sorted({entry.get("scenario", "") for entry in self.entries.values()} - {""})
        chats = [f"memory_prereq_conversation/memory_{scenario}.json" for scenario in scenarios]
        return [name, f"possible_answer/{name}", *chats]

    def configured(
        self, entry: dict[str, Any], snapshot: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Give an entry the initial state that the official command line would give it."""
        if self.kind == "web_search":
            settings: dict[str, Any] = {"show_snippet": "no_snippet" not in self.name}
        elif self.kind == "memory":
            settings = {"snapshot": snapshot}
        else:
            return entry
        return {**entry, "initial_config": {entry["involved_classes"][0]: settings}}


def kind_of(category: str) -> str:
    return next(kind for kind in ("multi_turn", "web_search", "memory") if kind in category)


def backend_of(name: str) -> str:
    """Return the memory backend in the name of a category, a question or a conversation."""
    rest = name.removeprefix("memory_")
    return next(backend for backend in ("kv", "vector", "rec_sum") if rest.startswith(backend))
