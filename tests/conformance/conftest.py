"""Tests of the engine conformance suite run on tiny models, on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
"""Where the broken engines are imported from."""
