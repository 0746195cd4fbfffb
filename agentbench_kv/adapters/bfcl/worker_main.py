"""Commands of the BFCL worker; runs in the bfcl environment under `worker_child`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from bfcl_eval.constants import eval_config
from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING
from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

from .completions import Completions, ContextLimitError, Endpoint
from .handler import RawSessionHandler, TruncatedError
from .scoring import SimulatorNames, verdict
from .scripts import script
from .transcript import END, INSTRUCTIONS

CATEGORY = "multi_turn_base"


class Guard(Protocol):
    """The part of the worker's guard that is used here."""

    def allow(self, host: str, port: int) -> None:
        """Let sockets connect to `host:port`."""

    def install(self) -> None:
        """Start refusing everything else."""


class Request(Protocol):
    """The part of the worker's request that is used here."""

    args: dict[str, Any]
    cancelled: Any
    guard: Guard

    def on_cancel(self, action: Callable[[], None] | None) -> None:
        """Register what breaks off a blocking read."""


class Benchmark:
    """The loaded category and its commands."""

    def __init__(self) -> None:
        self._entries = {e["id"]: e for e in load_dataset_entry(CATEGORY)}
        self._truth = {e["id"]: e["ground_truth"] for e in load_ground_truth_entry(CATEGORY)}
        self._names = SimulatorNames()

    def import_simulators(self) -> None:
        """Import what the executor would import on first use, while files may still be written."""
        used = {name for entry in self._entries.values() for name in entry["involved_classes"]}
        for module in sorted({CLASS_FILE_PATH_MAPPING[name] for name in used}):
            importlib.import_module(module)

    def about(self, _: Request) -> dict[str, Any]:
        """Return versions and hashes."""
        return {
            "bfcl_eval": importlib.metadata.version("bfcl-eval"),
            "category": CATEGORY,
            "data_sha256": _data_sha256(),
            "prompt_sha256": hashlib.sha256(INSTRUCTIONS.encode()).hexdigest(),
            "route": "raw",
        }

    def samples(self, _: Request) -> list[str]:
        """Return the ids in the official order."""
        return list(self._entries)

    def script(self, request: Request) -> list[str]:
        """Return the raw texts of a scripted agent."""
        sample = request.args["sample"]
        tools = self._entries[sample]["function"]
        return script(request.args["agent"], self._truth[sample], tools)

    def run(self, request: Request) -> dict[str, Any]:
        """Play one episode against the endpoint and check it."""
        entry = deepcopy(self._entries[request.args["sample"]])
        with self._names.take(entry["id"]) as name:
            handler = RawSessionHandler(name, entry["function"], _line(request))
            try:
                texts, _ = handler.inference(entry, False, True)
            except (TruncatedError, ContextLimitError) as error:
                return _report(handler, "context_limit", {"error_message": str(error)})
            # The loop gave up after too many steps; the benchmark fails such an entry unchecked.
            # Giving up in the last turn leaves no turn out, and is checked like any other end.
            if len(texts) < len(entry["question"]):
                return _report(handler, "turn_limit", {"error_type": "multi_turn:force_terminated"})
            checked = verdict(entry, self._truth[entry["id"]], texts, name)
            return _report(handler, "scored", checked)


def _line(request: Request) -> Completions:
    args = request.args
    endpoint = Endpoint.of(args["endpoint"])
    request.guard.allow(endpoint.host, endpoint.port)
    return Completions(
        endpoint,
        session=args["session"],
        body={"stop": [END], **args["sampling"]},
        key=args["key"],
        timeout_s=args["timeout_s"],
        cancelled=request.cancelled,
        on_cancel=request.on_cancel,
    )


def _report(handler: RawSessionHandler, status: str, checked: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": status,
        "score": float(checked["valid"]) if status == "scored" else None,
        "verdict": json.loads(json.dumps(checked, default=repr)),
        "steps": handler.steps,
        "text": handler.transcript.text,
    }


def _data_sha256() -> str:
    digest = hashlib.sha256()
    data = Path(eval_config.PROMPT_PATH)
    name = f"BFCL_v4_{CATEGORY}.json"
    documents = sorted(Path(eval_config.MULTI_TURN_FUNC_DOC_PATH).glob("*.json"))
    for path in (data / name, data / "possible_answer" / name, *documents):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def setup(guard: Guard) -> dict[str, Callable[[Request], Any]]:
    """Load the data and the simulators, then close the doors."""
    benchmark = Benchmark()
    benchmark.import_simulators()
    # The official loop prints a line per step.
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    guard.install()
    return {
        "about": benchmark.about,
        "samples": benchmark.samples,
        "script": benchmark.script,
        "run": benchmark.run,
    }
