"""One AppWorld task: its databases in memory, its apps' functions, its tests of the final state.

AppWorld's own class of that name is not used: it opens a shell for code that a model wrote, and
writes every state to the disk. What is left of it are the calls below.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import freezegun
from appworld import evaluator
from appworld.api_docs import prepare_api_docs
from appworld.apps import get_all_apps, model_lib
from appworld.apps.model_lib import get_db_home_path
from appworld.collections.models import ModelCollection
from appworld.common.path_store import path_store
from appworld.requester import Requester
from appworld.task import Task

_SEED = 100  # what AppWorld draws access tokens with by default
_OPEN_TO_ALL = frozenset({"api_docs", "supervisor"})
CALL_ANY = "call_api"
DONE = "supervisor__complete_task"


def read_only(path: str) -> sqlite3.Connection:
    """Open a database on the disk as AppWorld does, but for reading alone."""
    return sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)


def prepare() -> None:
    """Do once what every process of a trial needs."""
    model_lib.get_direct_sqlite3_connection = read_only
    # The agent's connection waits and measures by the real clock, whatever the apps are shown.
    freezegun.configure(extend_ignore_list=["kvbench_worker"])


@functools.cache
def functions() -> dict[str, dict[str, Any]]:
    """Return all public functions, `APP__API`, in the form AppWorld gives them to models."""
    found: dict[str, dict[str, Any]] = {}
    for app in get_all_apps(skip_admin=True):
        for each in prepare_api_docs(app, format="function_calling"):
            plain = json.loads(json.dumps(each, default=dict))
            found[plain["function"]["name"]] = plain
    return found


@functools.cache
def _routes() -> list[tuple[str, str, re.Pattern[str]]]:
    """Return every function with its method and the form of its URL."""
    routes = []
    for app in get_all_apps(skip_admin=True):
        for doc in prepare_api_docs(app):
            parts = re.split(r"{(\w+)}", doc["path"])
            texts = [re.escape(each) for each in parts[::2]]
            fields = [f"(?P<{name}>[^/]+)" for name in parts[1::2]]
            form = "".join(a + b for a, b in zip(texts, [*fields, ""], strict=True))
            name = f"{app}__{doc['api_name']}"
            routes.append((name, doc["method"].lower(), re.compile(form)))
    # `/notes/search` before `/notes/{note_id}`.
    return sorted(routes, key=lambda route: route[2].groups)


def named(recorded: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the function and the arguments of a request that AppWorld recorded."""
    for name, method, form in _routes():
        if method == recorded["method"] and (match := form.fullmatch(recorded["url"])):
            return name, {**recorded["data"], **match.groupdict()}
    raise LookupError(f"no API takes {recorded['method']} {recorded['url']}")


class World:
    """A task that is being played. One for each process: the apps know one set of databases."""

    def __init__(self, name: str) -> None:
        self.task = Task.load(task_id=name)
        self.calls = 0
        self._home = get_db_home_path(storage_type="memory", type="task_output", task_id=name)
        apps = self.task.allowed_apps
        # Before the end's: the models are set to the databases that were loaded last.
        _ = self.task.model_collection
        source = self.task.models_from_db_home_path
        self._requester = Requester(
            to_db_home_path=self._home,
            from_db_home_path=source,
            date_and_time=self.task.datetime,
            random_seed=_SEED,
            load_apps=apps,
        )
        self._end = ModelCollection.load(self._home, source, load_apps=apps)
        random.seed(_SEED)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a function as an agent does; return what it answers, which may be an error."""
        if name not in functions():
            return {"message": f"There is no function {name}."}
        self.calls += 1
        known = functions()[name]["function"]["parameters"]["properties"]
        given = {key: value for key, value in arguments.items() if key in known}
        try:
            return self._requester.request(*name.split("__", 1), **given)
        except Exception as error:  # noqa: BLE001  what an argument makes of an app is the agent's
            return {"message": f"{type(error).__name__}: {error}"[:500]}

    def completed(self) -> bool:
        active = self._requester.request("supervisor", "show_active_task", track=False)
        return active.get("status") is not None

    def verdict(self) -> dict[str, Any]:
        """Run AppWorld's own tests on the state as it is."""

        def end(**_: Any) -> ModelCollection:
            self._end.reset_db_home_path()
            return self._end

        # It would look for the state on the disk, where nothing is written.
        evaluator.ModelCollection = SimpleNamespace(load=end)
        found: dict[str, Any] = evaluator.evaluate_task(self.task.id, save_report=False).to_dict()
        return found


def recorded_calls(name: str) -> list[dict[str, Any]]:
    """Return the requests of a task's solution; LookupError if the data has none."""
    path = Path(path_store.data) / "tasks" / name / "ground_truth" / "api_calls.json"
    if not path.is_file():
        raise LookupError(f"AppWorld's data has no recorded solution of {name}")
    recorded: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return recorded


def solution(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the calls of a task's recorded solution, with the access tokens of this run."""
    world, tokens = World(name), dict[str, str]()
    for recorded in recorded_calls(name):
        function, arguments = named(recorded)
        app = function.partition("__")[0]
        # Some functions want another app's token, too: `file_system_access_token`.
        for key in [each for each in arguments if each.endswith("access_token")]:
            whose = key.removesuffix("access_token").rstrip("_") or app
            arguments[key] = tokens.get(whose, arguments[key])
        answer = world.call(function, arguments)
        if isinstance(answer, dict) and "access_token" in answer:
            tokens[app] = answer["access_token"]
        yield function, arguments


def needed(name: str) -> list[str]:
    """Return the functions that a task's solution calls, and those of the apps that all need."""
    called = {named(recorded)[0] for recorded in recorded_calls(name)}
    return [each for each in functions() if each in called or each.split("__")[0] in _OPEN_TO_ALL]


def basic() -> list[str]:
    return [each for each in functions() if each.split("__")[0] in _OPEN_TO_ALL]
