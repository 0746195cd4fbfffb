"""The official checker, and the simulators' state around it; runs in the bfcl environment."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bfcl_eval.eval_checker.agentic_eval.agentic_checker import agentic_checker
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from .calls import parse, to_python, tool_names

_OF_THE_CHECKER = ("_eval", "_ground_truth_eval")


class SimulatorNames:
    """Names under which trials keep their simulators.

    BFCL keeps simulators in module globals under the model's name and the sample's id, and never
    resets them. A living trial has a name of its own, and what it kept is deleted when it ends.
    The smallest free number is used, not a random one: the name can surface in a tool's result,
    and the prompts of two equal trials must be equal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: set[tuple[str, int]] = set()

    @contextmanager
    def take(self, sample: str) -> Iterator[str]:
        """Hold a name for one trial of `sample`."""
        with self._lock:
            number = next(n for n in range(len(self._used) + 1) if (sample, n) not in self._used)
            self._used.add((sample, number))
        name = f"kvbench{number}"
        try:
            yield name
        finally:
            for key in simulators(name, sample, *_OF_THE_CHECKER):
                vars(multi_turn_utils).pop(key, None)
            with self._lock:
                self._used.discard((sample, number))


def simulators(name: str, sample: str, *infixes: str) -> dict[str, Any]:
    """Return the running conversation's simulators, and the checker's of the given infixes."""
    names = (f"{name}{infix}_{sample}_" for infix in ("", *infixes))
    prefixes = tuple(re.sub(r"[-./:]", "_", each) for each in names)
    held = list(vars(multi_turn_utils).items())  # other threads add theirs meanwhile
    return {key: value for key, value in held if key.startswith(prefixes)}


def verdict(
    entry: dict[str, Any],
    ground_truth: Sequence[Sequence[str]],
    texts: Sequence[Sequence[str]],
    name: str,
) -> dict[str, Any]:
    """Run the official checker on the visible texts, by turn and step, of the trial of a name."""
    tools = tool_names(entry)
    steps = [[parse(text)[0] for text in turn] for turn in texts]
    lines = [[[to_python(c, tools) for c in calls] for calls in turn if calls] for turn in steps]
    category = entry["id"].rsplit("_", 1)[0]
    return dict(multi_turn_checker(lines, ground_truth, entry, category, name))


def answer_verdict(possible: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """Run the official checker of web search and memory on the last text without calls."""
    answers = [text for text in texts if not parse(text)[0]]
    if not answers or not answers[-1]:
        return {"valid": False, "error_type": "agentic:no_last_message"}
    return dict(agentic_checker(answers[-1], list(possible)))
