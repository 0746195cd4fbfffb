"""Errors a user can cause: one clear line, exit code 2, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVBenchError(Exception):
    """Base of every error whose message is meant for the person at the terminal."""

    exit_code = 2


class UsageError(KVBenchError):
    """The request is wrong: an unknown name, a value out of range, two options that clash."""


class PrerequisiteError(KVBenchError):
    """Something needed is missing; the message names it and the command that mends it."""


class CapacityError(KVBenchError):
    """The KV cache cannot hold what was asked for, however long one waits."""


class EndpointError(KVBenchError):
    """An endpoint gave no usable answer however often it was asked; later it may."""


class EngineGoneError(KVBenchError):
    """The engine will answer nothing any more: the end of a run, never of a trial."""

    exit_code = 1


class SessionFailedError(KVBenchError):
    """An engine's session ended by an error of its own, the cause; its neighbours go on."""


class MemoryLostError(KVBenchError):
    """A memory went with the backend that had it: whoever told it the past may tell it again."""


class ContextLimitError(KVBenchError):
    """A session would pass the model's last position."""


LISTED = ("method", "engine", "task")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Build the error for a name that is not registered, with the near match if there is one.

    Parameters
    ----------
    kind : str
        What was looked up, as the user would say it ("method", "task").
    name : str
        What the user typed.
    known : iterable of str
        The names that exist.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
    more = f" (kvbench ls {kind}s shows all)" if kind in LISTED else ""
    return UsageError(f"unknown {kind} {name!r}; {hint}{more}")
