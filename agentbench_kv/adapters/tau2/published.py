"""The published data of tau2-bench, by the hashes that its repository knows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.data import data_file
from agentbench_kv.adapters.tau2.releases import Release
from agentbench_kv.errors import PrerequisiteError

_USER_FILES = ("simulation_guidelines.md", "simulation_guidelines_tools.md")


def require_data(release: Release, domain: str) -> Path:
    """Return the data folder (`TAU2_DATA_DIR`) once it holds what the domain needs.

    PrerequisiteError if something is missing, or tasks or policies are not the published ones.
    """
    hint = (
        f"it is the folder data/ of tau2-bench {release.tag} "
        f"(https://github.com/sierra-research/tau2-bench/tree/{release.tag}/data) under that name"
    )
    root = data_file(release.data, None, hint)
    for name in _USER_FILES:
        data_file(f"{release.data}/tau2/user_simulator/{name}", None, hint)
    for name, blob in release.published[domain].items():
        path = data_file(f"{release.data}/tau2/domains/{domain}/{name}", None, hint)
        found = git_blob(path)
        # Another database is allowed, because the airline's had to be rebuilt in some copies;
        # `data_state` tells it.
        if found != blob and Path(name).stem not in ("db", "user_db"):
            raise PrerequisiteError(
                f"{path} is not the published file: git blob {found[:12]}, expected {blob[:12]}; "
                f"{hint}"
            )
    return root


def data_state(release: Release, domain: str, root: Path) -> dict[str, Any]:
    """Return the hash of every file in use, and which ones are not the published ones."""
    folder = root / "tau2" / "domains" / domain
    published = release.published[domain]
    found = {name: git_blob(folder / name) for name in published}
    other = sorted(name for name, blob in published.items() if found[name] != blob)
    return {"data_git_blobs": found, "data_not_as_published": other}


def git_blob(path: Path) -> str:
    """Return the id that git gives to a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
