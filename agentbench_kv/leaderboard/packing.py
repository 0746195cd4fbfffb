"""Making a submission: a copy of runs with a manifest that says whose they are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentbench_kv.errors import UsageError
from agentbench_kv.leaderboard.layout import (
    HASHED,
    MANIFEST,
    TRANSCRIPTS,
    first_error,
    hashes,
    is_plain,
    transcripts,
)
from agentbench_kv.results.files import write_atomic, writing
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.submissions import Manifest
from agentbench_kv.results.summary import summarize


def pack(
    runs: Sequence[RunReader],
    folder: Path,
    *,
    who: str,
    method: str,
    link: str = "",
    with_transcripts: bool = True,
) -> Manifest:
    """Make a submission of runs; their summaries are derived again.

    Parameters
    ----------
    runs : sequence of RunReader
        The runs, left as they are.
    folder : Path
        Must not exist or be empty.
    who, method, link : str
        As `Manifest` holds them.
    with_transcripts : bool
        Without them scores can be neither derived again nor compared with a rerun.

    Raises
    ------
    UsageError
        If the folder is in use, or a name or the link is not acceptable.
    PrerequisiteError
        If it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; name a new folder")
    about = {"who": who, "method": method, "link": link}
    # Refuse names before anything is written.
    _manifest({**about, "runs": [{"run_id": run.info.run_id, "sha256": {}} for run in runs]})
    listed = []
    for run in runs:
        target = folder / run.info.run_id
        with writing(target):
            copy_run(run.path, target, with_transcripts=with_transcripts)
        summarize(RunReader(target))
        listed.append({"run_id": target.name, "sha256": hashes(target)})
    manifest = _manifest({**about, "runs": listed})
    text = manifest.model_dump_json(indent=2, by_alias=True)
    write_atomic(folder / MANIFEST, text.encode() + b"\n")
    return manifest


def copy_run(source: Path, target: Path, *, with_transcripts: bool = True) -> None:
    """Copy the plain files of a run that this version knows, nothing else."""
    names = list(HASHED)
    if with_transcripts:
        names += [f"{TRANSCRIPTS}/{name}" for name in transcripts(source)]
    for name in names:
        if is_plain(source / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def _manifest(content: dict[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"the submission: {first_error(error)}") from None
