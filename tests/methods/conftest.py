"""Fixtures of the method tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
"""Where the numpy formulations (`methods_reference*.py`) are imported from."""
