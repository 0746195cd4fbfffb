"""A folder on a backend's import path that holds our package and nothing else of ours.

The backend's interpreter has its own torch and transformers. Our site-packages on its path would
hide them, so it gets links to the packages it needs, and the metadata of its entry points.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import agentbench_kv
from agentbench_kv.errors import UsageError


def link_packages(
    folder: Path, modules: Iterable[str], entry_points: Mapping[str, Mapping[str, str]]
) -> Path:
    """Fill `folder` and return it.

    The top-level packages of `modules`, such as a plugged-in method's, are linked beside ours. The
    backend sees `entry_points` (group -> name -> object) as those of an installed distribution.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for root in {"agentbench_kv", *(module.partition(".")[0] for module in modules)}:
        source = _source(root)
        link = folder / source.name
        if not link.is_symlink():
            link.symlink_to(source)
    if entry_points:
        _write_metadata(folder, entry_points)
    return folder


def _source(root: str) -> Path:
    """Return the folder or file of a top-level module that is imported already."""
    file = getattr(sys.modules[root], "__file__", None)
    if file is None:
        raise UsageError(
            f"{root} has no file a backend could import; put the method into a package"
        )
    path = Path(file).resolve()
    return path.parent if path.name == "__init__.py" else path


def _write_metadata(folder: Path, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    version = agentbench_kv.__version__
    info = folder / f"kvbench_backend-{version}.dist-info"
    info.mkdir(exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: kvbench-backend\nVersion: {version}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
