"""kvbench: the truth about KV-cache methods on LLM agents."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentbench_kv.results.frame import load_results

__all__ = ["__version__", "load_results"]

__version__ = "0.1.0"

# Modules that plug-ins and scripts written for 0.1.0 import, and where their names are now.
MOVED = {
    "adapters.browser.documents": "adapters.browser.corpus",
    "adapters.browser.seal": "adapters.browser.answers",
    "adapters.browser.tools": "adapters.browser.browser",
    "analysis.events": "analysis.replay",
    "engines.blocks": "engines.core.block_engine",
    "engines.options": "engines.base",
    "methods.blocks": "methods.spans",
    "methods.params": "params",
    "methods.phases": "methods.base",
    "methods.views": "methods.base",
    "phases.codec": "phases.tokens",
    "runner": "run.runner",
    "spec": "run.spec",
}


def __getattr__(name: str) -> Any:
    # pandas takes half a second, which `import agentbench_kv` should not.
    if name == "load_results":
        from agentbench_kv.results.frame import load_results

        return load_results
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module that has moved from its old name, with a warning that says the new one."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        moved = fullname.startswith(f"{__name__}.") and fullname[len(__name__) + 1 :] in MOVED
        return importlib.util.spec_from_loader(fullname, self) if moved else None

    def exec_module(self, module: ModuleType) -> None:
        now = f"{__name__}.{MOVED[module.__name__[len(__name__) + 1 :]]}"
        warnings.warn(f"{module.__name__} is {now} now", DeprecationWarning, stacklevel=2)
        names = vars(import_module(now))
        vars(module).update({k: v for k, v in names.items() if not k.startswith("__")})


sys.meta_path.append(_MovedModules())
