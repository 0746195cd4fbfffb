"""The file that says an environment is complete: written last, replaced atomically."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

MARKER_FILE = "kvbench-environment.json"


@dataclass(frozen=True)
class Marker:
    """What a finished environment holds."""

    name: str
    lock_sha256: str  # of the lock it was built from
    python: str  # `major.minor`
    packages: dict[str, str]  # distribution name to version
    source: str = ""  # what was installed from a repository

    def write(self, folder: Path) -> None:
        draft = folder / f"{MARKER_FILE}.part"
        draft.write_text(json.dumps(asdict(self), indent=1, sort_keys=True), encoding="utf-8")
        draft.replace(folder / MARKER_FILE)


def read_marker(folder: Path) -> Marker | None:
    """Return the marker of `folder`, or None if the environment is unfinished."""
    try:
        fields = json.loads((folder / MARKER_FILE).read_text(encoding="utf-8"))
        return Marker(**fields)
    except (OSError, ValueError, TypeError):
        return None
