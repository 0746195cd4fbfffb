"""JSON for programs; light, because some verbs need nothing else."""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["print_json"]


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
