"""Which SGLang this adapter was written for, and what a server is told by its environment."""

from __future__ import annotations

import importlib.metadata

from agentbench_kv.engines.serving.backend.parent import refuse_untested

TESTED = "0.5.12"
# The server's key comes this way because everybody may read a command line.
KEY = "KVBENCH_SGLANG_KEY"


def check_version() -> None:
    """End the process unless SGLang is the tested version, or another one is allowed."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "kvbench: SGLang is not installed here; make it with: kvbench env create sglang"
        ) from None
    refuse_untested("SGLang", version, TESTED)
