"""What was imported from 0.1.0 is found where it was."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module

import pytest

from agentbench_kv import MOVED

NAMES = {
    "adapters.browser.documents": "Document",
    "adapters.browser.seal": "unseal",
    "adapters.browser.tools": "TOOLS call_tool",
    "analysis.events": "event_points replay",
    "engines.blocks": "BlockEngine",
    "engines.options": "EngineOptions ScriptSource",
    "methods.blocks": "SpanMethod",
    "methods.params": "param ParamSpec",
    "methods.phases": "Phase",
    "methods.views": "LayerView Queries QueryKind QueryPlan ScoreContext Selection",
    "phases.codec": "TokenCodec load_tokenizer",
    "runner": "run_all run_one",
    "spec": "RunSpec grid resolve",
}


def test_the_list_is_whole() -> None:
    assert NAMES.keys() == MOVED.keys()


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_one(old: str) -> None:
    sys.modules.pop(f"agentbench_kv.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"{MOVED[old]} now"):
        module = import_module(f"agentbench_kv.{old}")
    for name in NAMES[old].split():
        assert getattr(module, name) is getattr(import_module(f"agentbench_kv.{MOVED[old]}"), name)


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError), warnings.catch_warnings():
        import_module("agentbench_kv.methods.viewz")


def test_a_plug_in_written_for_the_first_version_runs() -> None:
    """As a plug-in's own process imports it, whatever was imported before."""
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from agentbench_kv.methods.views import LayerView\n"
        "from agentbench_kv.methods.params import param\n"
        "from agentbench_kv.methods.base import Method, QueryKind, QueryPlan\n"
        "from agentbench_kv.methods import base\n"
        "assert LayerView is base.LayerView\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
