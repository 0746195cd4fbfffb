"""The AppWorld worker's entry; nothing of AppWorld is imported before `setup`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...agent_client import NULL_SENTENCE, call_text, think_block

_WRONG = "none of this"


def setup(guard: Any) -> dict[str, Callable[[Any], Any]]:
    """Load what all trials share, then close the doors."""
    from appworld.common.path_store import path_store
    from appworld.task import load_task_ids, task_id_to_generator_id

    from . import world
    from .episode import play

    names = load_task_ids(os.environ["KVBENCH_APPWORLD"])
    world.prepare()
    functions = world.functions()
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    guard.install(path_store.data, Path.cwd())

    def about(_: Any) -> dict[str, Any]:
        return {"appworld": importlib.metadata.version("appworld"), "functions": len(functions)}

    def samples(_: Any) -> list[dict[str, Any]]:
        return [{"id": each, "scenario": task_id_to_generator_id(each), "tests": tests(each)}
                for each in names]  # fmt: skip

    def tests(name: str) -> int:
        path = Path(path_store.data) / "tasks" / name / "ground_truth" / "test_data.json"
        return len(json.loads(path.read_text(encoding="utf-8")) or ())

    def script(request: Any) -> list[str]:
        agent, offered = request.args["agent"], request.args["apis"]
        if agent == "null":
            return [NULL_SENTENCE]
        calls = list(world.solution(request.args["sample"]))
        if agent == "corrupt":
            calls = corrupted(calls)
        return [*spoken(calls, offered), "Done."]

    return {"about": about, "samples": samples, "script": script, "run": play}


Calls = list[tuple[str, dict[str, Any]]]


def corrupted(calls: Calls) -> Calls:
    """Leave out what changed something last; where nothing did, answer wrongly."""
    changing = [i for i, (name, _) in enumerate(calls) if _changes(name)]
    if changing:
        return [call for i, call in enumerate(calls) if i != changing[-1]]
    return [(name, {**args, "answer": _WRONG} if "complete_task" in name else args)
            for name, args in calls]  # fmt: skip


def _changes(name: str) -> bool:
    app, _, api = name.partition("__")
    return app != "supervisor" and not api.startswith(("show_", "search_", "login", "logout"))


def spoken(calls: Calls, offered: str) -> Iterator[str]:
    """Write the answers of an agent that makes these calls, one in each."""
    for name, arguments in calls:
        app, _, api = name.partition("__")
        said = call_text(name, arguments)
        if offered == "docs" and app not in ("api_docs", "supervisor"):
            whole = {"app_name": app, "api_name": api, "arguments": arguments}
            said = call_text("call_api", whole)
        yield think_block(f"The next step is {name}.") + said
