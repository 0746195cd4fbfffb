"""Packages that only plots and t-SNE need."""

from __future__ import annotations

from importlib.util import find_spec

from agentbench_kv.errors import PrerequisiteError

_PACKAGES = {"matplotlib": ("plots need", "matplotlib"), "sklearn": ("tsne needs", "scikit-learn")}


def need(module: str) -> None:
    """Raise a PrerequisiteError with the command to install a package that is absent."""
    if find_spec(module) is None:
        purpose, package = _PACKAGES[module]
        raise PrerequisiteError(
            f"{purpose} {package}, from the extra [analysis]: in the clone, pip install "
            f'".[analysis]"; elsewhere, pip install {package}'
        )
