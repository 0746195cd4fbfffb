"""Which SGLang this adapter was written for, and what a server is told by its environment."""

from __future__ import annotations

import importlib.metadata
import os

TESTED = "0.5.12"
ALLOW = "KVBENCH_ALLOW_UNTESTED_ENGINE"
KEY = "KVBENCH_SGLANG_KEY"
"""The server's key comes this way because everybody may read a command line."""


def check_version() -> None:
    """End the process unless SGLang is the tested version, or another one is allowed."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "kvbench: SGLang is not installed here; make it with: kvbench env create sglang"
        ) from None
    if version != TESTED and not os.environ.get(ALLOW):
        raise SystemExit(
            f"kvbench: SGLang {version} is here, the adapter was tested with {TESTED}; "
            "install that, or go on with --allow-untested-engine"
        )
