"""The parsers of an unpacked wheel, without what the rest of its package needs.

Its `__init__` is passed over, and what parsing has no use for is stood in for: modules of which
every name is a class that takes and gives anything.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# Of the package itself, and packages that may be missing.
NEEDLESS = {
    "sglang": ((), ("IPython", "xgrammar")),
    "vllm": (
        ("vllm.renderers", "vllm.multimodal", "vllm.config", "vllm.inputs", "vllm.platforms"),
        (
            *("cbor2", "zmq", "openai_harmony", "fastapi", "uvloop", "cpuinfo"),
            *("prometheus_client", "ijson", "mistral_common", "xgrammar"),
        ),
    ),
}

# What parsing does use of a module that is stood in for.
USED = {"vllm.renderers.chat_utils": {"make_tool_call_id": lambda *_, **__: "call_1"}}


class _AnythingType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __or__(cls, _: object) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_AnythingType):
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *given: Any, **_: object) -> Any:
        return given[0] if given and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class StandIns(MetaPathFinder, Loader):
    """Finds modules of these names, and below them, that hold `Anything`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def find_spec(self, name: str, path: object, target: object = None) -> Any:  # noqa: ARG002
        stands_in = any(name == each or name.startswith(f"{each}.") for each in self._names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stands_in else None

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update(USED.get(spec.name, {}))
        module.__getattr__ = lambda name: getattr(Anything, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def prepare(package: str, folder: Path) -> None:
    """Have imports find a package in the folder that its wheel was unpacked to."""
    own, others = NEEDLESS[package]
    missing = [name for name in others if find_spec(name) is None]
    sys.meta_path.insert(0, StandIns([*own, *missing]))
    root = ModuleType(package)
    root.__path__ = [str(folder / package)]
    root.__version__ = "unpacked"  # type: ignore[attr-defined]
    sys.modules[package] = root
