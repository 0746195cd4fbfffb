"""The scripts of `benchmarks/` that these tests run in short form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_SCRIPTS = Path(__file__).parents[2] / "benchmarks"
if not (_SCRIPTS / "faults.py").is_file():
    pytest.skip(
        "benchmarks/ is not here: not a checkout of the repository", allow_module_level=True
    )
# The scripts import one another by these names; so do the processes that they start.
sys.path.append(str(_SCRIPTS))
