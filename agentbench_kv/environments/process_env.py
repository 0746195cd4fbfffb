"""What the command line tells the libraries of its own process, by environment variables.

They are read when PyTorch is loaded. A serving engine runs as it was shipped: its process does not
inherit them (docs/decisions, "waiting threads" and "huge pages"). llama.cpp's server is our own
program, and is given them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

_SETTINGS = {
    # GNU OpenMP: threads that wait for one another spin for milliseconds by default, which takes
    # the processor from the very thread they wait for wherever something else runs too.
    "GOMP_SPINCOUNT": "1000",
    # PyTorch: large tensors lie in pages of 2 MiB, where scattered cache rows are found sooner.
    "THP_MEM_ALLOC_ENABLE": "1",
}

_SAME_MATTER = {"GOMP_SPINCOUNT": "OMP_WAIT_POLICY"}
# By which a user keeps PyTorch and oneDNN from a processor's newer instructions.
_INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
_applied: set[str] = set()


def apply() -> None:
    """Set every variable about which the user has said nothing."""
    chosen = settings()
    os.environ.update(chosen)
    _applied.update(chosen)


def settings() -> dict[str, str]:
    """Return the variables about which the user has said nothing, for a process of our own."""
    theirs = without(os.environ)
    return {
        name: value
        for name, value in _SETTINGS.items()
        if name not in theirs and _SAME_MATTER.get(name, name) not in theirs
    }


def in_force(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what each variable says that is set here, stands for one of these, or limits speed."""
    names = (*_SETTINGS, *_SAME_MATTER.values(), *_INSTRUCTIONS)
    return {name: environment.get(name, "unset") for name in names}


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment as the user made it.

    Parameters
    ----------
    environment : mapping of str to str
        This process's variables, or some of them.
    """
    return {name: value for name, value in environment.items() if name not in _applied}


def said(names: Iterable[str], environment: Mapping[str, str]) -> str:
    """Return what the user has said of some variables, as `NAME=value NAME=value`."""
    theirs = without(environment)
    return " ".join(f"{name}={theirs[name]}" for name in names if name in theirs)
