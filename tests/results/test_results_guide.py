"""The package's guide names every module, and no other."""

from __future__ import annotations

import pkgutil
import re

from agentbench_kv import results


def test_the_guide_names_the_modules_that_there_are():
    guide = results.__doc__.partition("Where to find what:")[2]
    named = set(re.findall(r"`(\w+)`", guide)) - {"load_results", "report"}  # not modules
    assert named == {module.name for module in pkgutil.iter_modules(results.__path__)}
