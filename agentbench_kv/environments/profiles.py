"""What each managed environment holds, and how to tell that it works."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from agentbench_kv.errors import UsageError

LOCKS = Path(__file__).parent / "locks"

BFCL_PROBE = """
import os, tempfile
scratch = tempfile.TemporaryDirectory()
os.environ["BFCL_PROJECT_ROOT"] = scratch.name
import bfcl_eval.model_handler.base_handler
import bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker
from bfcl_eval.utils import load_dataset_entry
entries = len(load_dataset_entry("multi_turn_base"))
if entries != 200:
    raise SystemExit(f"multi_turn_base has {entries} entries, expected 200")
"""


@dataclass(frozen=True)
class Profile:
    """A pinned environment.

    Attributes
    ----------
    name, summary : str
        Name on the command line, and what the environment is for.
    lock : Path
        Requirements file with exact pins of everything, installed without dependency resolution.
    oldest, newest : (int, int)
        Python versions for which every pin has a wheel.
    disk_mb : int
        Free space needed to build it.
    probe : str
        Python source that fails unless the environment does its job.
    """

    name: str
    summary: str
    lock: Path
    oldest: tuple[int, int]
    newest: tuple[int, int]
    disk_mb: int
    probe: str

    def lock_sha256(self) -> str:
        """Hash the pins, so that a changed lock gets a new folder."""
        return hashlib.sha256(self.lock.read_bytes()).hexdigest()

    def folder_name(self) -> str:
        """Return the name of the folder that this lock is built in."""
        return f"{self.name}-{self.lock_sha256()[:12]}"


PROFILES: dict[str, Profile] = {
    "bfcl": Profile(
        name="bfcl",
        summary="Berkeley Function-Calling Leaderboard v4: multi-turn loop, simulators, checker",
        lock=LOCKS / "bfcl.txt",
        oldest=(3, 11),
        newest=(3, 12),
        disk_mb=200,
        probe=BFCL_PROBE,
    ),
}


def profile(name: str) -> Profile:
    """Look a profile up, or say which ones there are."""
    if name not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        raise UsageError(f"no environment is called {name!r}; there is: {known} (kvbench env list)")
    return PROFILES[name]
