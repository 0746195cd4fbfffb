"""What is replaced in tau2-bench: how databases are loaded, and who judges assertions (v1.x)."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Sequence
from typing import Any

from tau2.data_model.simulation import NLAssertionCheck
from tau2.environment.db import DB
from tau2.evaluator import evaluator_nl_assertions as assertions

_RETRIES = 3
_WAIT_S = 120.0
_ask = assertions.NLAssertionsEvaluator.evaluate_nl_assertions


def keep_parsed() -> None:
    """Let `DB.load` parse and validate each file once, and hand out copies after that.

    A simulation and its check load the domain's files three times; the airline's take seconds.
    """
    load = DB.load.__func__
    packed: dict[tuple[str, str], bytes] = {}
    lock = threading.Lock()

    def load_copy(cls: type[DB], path: Any) -> Any:
        key = (cls.__qualname__, str(path))
        with lock:
            if key not in packed:
                packed[key] = pickle.dumps(load(cls, path), protocol=pickle.HIGHEST_PROTOCOL)
            # While that many objects are made, the collector looks at all of them again and again:
            # five times the work. (The bytes are this process's own.)
            gc.disable()
            try:
                return pickle.loads(packed[key])
            finally:
                gc.enable()

    DB.load = classmethod(load_copy)


class JudgeFailedError(Exception):
    """The judge gave no verdict on every assertion; the agent is not to blame."""


def appoint(settings: dict[str, Any]) -> None:
    """Choose the judge of all simulations from now on; the benchmark has no setting for it.

    `settings` are `kind` (`scripted` agrees to everything), `url`, `model` and `key`.
    """
    scripted = settings["kind"] == "scripted"
    if not scripted:
        assertions.DEFAULT_LLM_NL_ASSERTIONS = f"openai/{settings['model']}"
        assertions.DEFAULT_LLM_NL_ASSERTIONS_ARGS = {
            "temperature": 0.0,
            "timeout": _WAIT_S,
            "num_retries": _RETRIES,
            "api_base": settings["url"],
            # An OpenAI client wants some key even where the server wants none.
            "api_key": settings["key"] or "none",
        }
    assertions.NLAssertionsEvaluator.evaluate_nl_assertions = staticmethod(
        _agree if scripted else _judged
    )


def _agree(_: Sequence[Any], wanted: Sequence[str]) -> list[NLAssertionCheck]:
    said = "a scripted judge agrees to everything"
    return [NLAssertionCheck(nl_assertion=each, met=True, justification=said) for each in wanted]


def _judged(trajectory: Sequence[Any], wanted: Sequence[str]) -> list[NLAssertionCheck]:
    try:
        found: list[NLAssertionCheck] = _ask(trajectory, wanted)
    except Exception as error:
        raise JudgeFailedError(f"{type(error).__name__}: {error}"[:500]) from error
    # The benchmark takes a judge that says nothing for one that agrees.
    if len(found) != len(wanted):
        raise JudgeFailedError(f"the judge gave {len(found)} verdicts on {len(wanted)} assertions")
    return found
