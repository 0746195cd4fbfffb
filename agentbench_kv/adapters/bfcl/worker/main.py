"""Commands of the BFCL worker; runs in the bfcl environment under `worker_child`.

`KVBENCH_BFCL` in its environment says which categories it loads and what they need:
`{"categories": [...], "encoder": str, "web": {...}}`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bfcl_eval.constants import eval_config
from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING
from bfcl_eval.utils import is_memory_prereq, load_dataset_entry, load_ground_truth_entry

from ...agent_client import AgentConnection, ContextFullError
from . import web
from .handler import (
    ChatHandler,
    Check,
    DecidedError,
    RawSessionHandler,
    SessionHandler,
    answer_verdict,
    simulators,
    verdict,
    verdict_so_far,
)
from .memory import backend_of, contents, prepare
from .samples import Category, conversation_script, question_script, script, search_script
from .session import END, INSTRUCTIONS, all_tools

if TYPE_CHECKING:
    from agentbench_kv.adapters.worker_child import Guard, WorkerRequest

ROUTES: dict[str, type[SessionHandler]] = {"raw": RawSessionHandler, "chat": ChatHandler}


class BfclCommands:
    """The loaded categories, by official name, and what the worker answers about them."""

    def __init__(self, categories: list[str]) -> None:
        self._categories = {
            name: Category.of(name, load_dataset_entry(name), load_ground_truth_entry(name))
            for name in categories
        }
        # Memory's prerequisite conversations are among them, in the order in which they depend.
        self._entries = {
            name: (category, entry)
            for category in self._categories.values()
            for name, entry in category.entries.items()
        }

    def import_simulators(self) -> None:
        """Import what the executor would import on first use, while files may still be written."""
        used = {name for _, entry in self._entries.values() for name in entry["involved_classes"]}
        for module in sorted({CLASS_FILE_PATH_MAPPING[name] for name in used}):
            importlib.import_module(module)

    def truths(self) -> list[dict[str, Any]]:
        return [truth for each in self._categories.values() for truth in each.truth.values()]

    def about(self, _: WorkerRequest) -> dict[str, Any]:
        return {
            "bfcl_eval": importlib.metadata.version("bfcl-eval"),
            "category": ",".join(self._categories),
            "data_sha256": _data_sha256(list(self._categories.values())),
            "prompt_sha256": hashlib.sha256(INSTRUCTIONS.encode()).hexdigest(),
        }

    def samples(self, _: WorkerRequest) -> list[dict[str, Any]]:
        """Return ids and scenarios in the official order, category after category."""
        names = [name for category in self._categories.values() for name in category.truth]
        return [self._described(name) for name in names]

    def conversations(self, _: WorkerRequest) -> list[dict[str, Any]]:
        return [self._described(name) for name in self._entries if is_memory_prereq(name)]

    def script(self, request: WorkerRequest) -> list[str]:
        sample, agent = request.args["sample"], request.args["agent"]
        category, entry = self._entries[sample]
        if is_memory_prereq(sample):
            return conversation_script(agent, backend_of(sample), entry)
        truth = category.truth[sample]
        if category.kind == "web_search":
            return search_script(agent, truth)
        if category.kind == "memory":
            question = entry["question"][0][-1]["content"]
            return question_script(agent, backend_of(sample), question, truth["ground_truth"])
        return script(agent, truth["ground_truth"], all_tools(entry))

    def run(self, request: WorkerRequest) -> dict[str, Any]:
        sample = request.args["sample"]
        category, entry = self._entries[sample]
        entry = category.configured(deepcopy(entry), request.args.get("snapshot"))
        route, syntax = request.args["route"], request.args["syntax"]
        check = _check(category, entry) if request.args.get("until") == "decided" else None
        handler = ROUTES[route](entry, _line(request), syntax, check)
        try:
            texts, _ = handler.inference(entry, False, True)
        except DecidedError as error:
            return _report(handler, "scored", error.verdict)
        except ContextFullError as error:
            return _report(handler, "context_limit", {"error_message": str(error)})
        if is_memory_prereq(sample):
            (store,) = simulators(sample).values()
            whole = len(texts) == len(entry["question"])
            told = _report(handler, "scored" if whole else "turn_limit", {"valid": whole})
            return {**told, "snapshot": contents(store)}
        return _checked(category, entry, texts, handler)

    def close_session(self, request: WorkerRequest) -> dict[str, Any]:
        """Close a session that the harness does not close itself; return its KV account."""
        return _line(request).close_session()

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "scenario": self._entries[name][1].get("scenario")}


def _check(category: Category, entry: dict[str, Any]) -> Check:
    return partial(verdict_so_far, entry, category.truth[entry["id"]]["ground_truth"])


def _checked(
    category: Category, entry: dict[str, Any], texts: list[list[str]], handler: SessionHandler
) -> dict[str, Any]:
    """Run the checker, unless the loop gave up: the benchmark fails such an entry unchecked."""
    truth = category.truth[entry["id"]]["ground_truth"]
    if category.kind == "multi_turn":
        # Giving up in the last turn leaves no turn out, and is checked like any other end.
        if len(texts) < len(entry["question"]):
            return _report(handler, "turn_limit", {"error_type": "multi_turn:force_terminated"})
        return _report(handler, "scored", verdict(entry, truth, texts))
    if handler.decode_execute(texts[0][-1]):
        return _report(handler, "turn_limit", {"error_type": "agentic:force_terminated"})
    return _report(handler, "scored", answer_verdict(truth, texts[0]))


def _line(request: WorkerRequest) -> AgentConnection:
    stop = {"stop": [END]} if request.args["route"] == "raw" else {}
    return AgentConnection.of_trial(request, **stop)


def _report(handler: SessionHandler, status: str, checked: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": status,
        "score": float(checked["valid"]) if status == "scored" else None,
        "verdict": json.loads(json.dumps(checked, default=repr)),
        "steps": handler.steps,
        "text": handler.said(),
    }


def _data_sha256(categories: list[Category]) -> str:
    digest = hashlib.sha256()
    documents = sorted(Path(eval_config.MULTI_TURN_FUNC_DOC_PATH).glob("*.json"))
    names = dict.fromkeys(name for category in categories for name in category.files())
    own = [Path(eval_config.PROMPT_PATH) / name for name in names]
    for path in (*own, *documents):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _choose_web(wanted: dict[str, Any], commands: BfclCommands, guard: Guard) -> None:
    source: web.Web
    if wanted["kind"] == "service":
        guard.allow("127.0.0.1", wanted["port"])
        source = web.ServiceWeb(wanted["port"], wanted["token"])
    elif wanted["kind"] == "recording":
        source = web.RecordedWeb(Path(wanted["path"]))
    elif wanted["path"] == web.SYNTHETIC:
        source = web.CorpusWeb(web.synthetic_corpus(commands.truths()))
    else:
        source = web.CorpusWeb(web.read_corpus(Path(wanted["path"])))
    web.WebSearchAPI.web = source
    CLASS_FILE_PATH_MAPPING["WebSearchAPI"] = web.__name__


def setup(guard: Guard) -> dict[str, Callable[[WorkerRequest], Any]]:
    config = json.loads(os.environ["KVBENCH_BFCL"])
    backends = [backend_of(name) for name in config["categories"] if name.startswith("memory_")]
    prepare(backends, CLASS_FILE_PATH_MAPPING, config.get("encoder", ""))
    commands = BfclCommands(config["categories"])
    if "web" in config:
        _choose_web(config["web"], commands, guard)
    commands.import_simulators()
    # The official loop prints a line per step.
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    guard.install(Path.cwd(), *filter(Path.is_dir, [Path(config.get("encoder") or "hash")]))
    names = ("about", "samples", "conversations", "script", "run", "close_session")
    return {name: getattr(commands, name) for name in names}
