"""The engine that hosts our code: its version, its insides, and the harness it must not outlive."""

from __future__ import annotations

import inspect
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

PARENT = "KVBENCH_PARENT"  # pid of the harness, for the servers it starts
ALLOW_UNTESTED = "KVBENCH_ALLOW_UNTESTED_ENGINE"
_LOOK_S = 1.0
_GRACE_S = 10.0


def refuse_untested(engine: str, version: str, tested: Sequence[str]) -> None:
    """End the process unless this is a tested version, or another one is allowed.

    What follows a `+` names a build of that version (`+cpu`, `+cu129`).
    """
    if version.partition("+")[0] not in tested and not os.environ.get(ALLOW_UNTESTED):
        raise SystemExit(
            f"kvbench: {engine} {version} is here, the adapter was tested with "
            f"{' and '.join(tested)}; install that, or go on with --allow-untested-engine"
        )


def symbol_problems(symbols: Mapping[str, Sequence[str]], *, exact: bool) -> list[str]:
    """Return what is missing or different in an engine's insides, in words.

    `symbols` names functions with parameters, and dataclasses with fields, that are relied on; with
    `exact` there may be no others.
    """
    found = []
    for path, expected in symbols.items():
        try:
            symbol = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            found.append(f"{path} is gone ({type(error).__name__})")
            continue
        actual = _parameters(symbol) if expected else []
        if exact and actual != list(expected):
            found.append(f"{path} takes {', '.join(actual)}; expected {', '.join(expected)}")
        elif missing := [name for name in expected if name not in actual]:
            found.append(f"{path} has no {', '.join(missing)}")
    return found


def _parameters(symbol: Any) -> list[str]:
    if is_dataclass(symbol):
        return [each.name for each in fields(symbol)]
    return list(inspect.signature(getattr(symbol, "__func__", symbol)).parameters)


def refuse_unsupported(engine: str, problems: Mapping[str, bool]) -> None:
    """Raise ValueError with the problems that there are."""
    if found := [name for name, there in problems.items() if there]:
        raise ValueError(f"kvbench: eviction in {engine} does not support {', '.join(found)}")


def follow_parent() -> None:
    """End this process's group, which the harness made for it, once its parent is gone.

    The parent may be gone already: it says in the environment who it is. Processes that this one
    forks do the same: one that is killed leaves none that would hold memory for ever.
    """
    _end_without(int(os.environ.get(PARENT) or os.getppid()))
    os.register_at_fork(after_in_child=follow_server)


def follow_server() -> None:
    """Do so in a process that the server has started, which is never process 1 itself."""
    parent = os.getppid()
    _end_without(parent if parent != 1 else 0)  # left alone before it could look


def _end_without(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.killpg(0, signal.SIGTERM)
        time.sleep(_GRACE_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="kvbench-parent", daemon=True).start()
