"""What lies in a submission's folder: which files, their hashes, the manifest."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from agentbench_kv.errors import UsageError
from agentbench_kv.leaderboard.findings import Checks, Finding, Wrong
from agentbench_kv.leaderboard.strict import strict_json
from agentbench_kv.results.submissions import Manifest, SubmittedRun
from agentbench_kv.results.summary import FILE as SUMMARY

MANIFEST = "submission.json"
HASHED = ("samples.jsonl", "run.json", "turns.jsonl")
NEEDED = HASHED
TRANSCRIPTS = "transcripts"
_KNOWN = frozenset({*HASHED, SUMMARY, TRANSCRIPTS})


def read_manifest(folder: Path) -> Manifest:
    """Read `submission.json`.

    Raises
    ------
    UsageError
        If there is none or it is not one.
    """
    path = folder / MANIFEST
    if not is_plain(path):
        raise UsageError(
            f"{folder} is not a submission: no {MANIFEST}; kvbench leaderboard pack makes one"
        )
    try:
        return Manifest.model_validate(strict_json(path.read_bytes()))
    except ValidationError as error:
        raise UsageError(f"{path}: {first_error(error)}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def first_error(error: ValidationError) -> str:
    """Return the first thing that is wrong with data of a model."""
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


def check_listing(folder: Path, manifest: Manifest) -> list[Finding]:
    """Find runs listed twice, runs not listed and anything else in the folder."""
    listed = [run.run_id for run in manifest.runs]
    twice = sorted({name for name in listed if listed.count(name) > 1})
    present = sorted(entry.name for entry in folder.iterdir() if entry.name != MANIFEST)
    return [
        *(Finding(name, "", "listed twice") for name in twice),
        *(Finding(n, "", f"not listed in {MANIFEST}") for n in present if n not in listed),
    ]


def check_files(path: Path, listed: SubmittedRun) -> Checks:
    """Check that a run's files are plain, known, and those that were promised."""
    missing = [name for name in NEEDED if not is_plain(path / name)]
    yield from (Wrong(name, "is missing or not a plain file") for name in missing)
    if missing:
        return
    for entry in sorted(path.iterdir()):
        if entry.name not in _KNOWN or entry.is_symlink():
            yield Wrong(ascii(entry.name)[1:-1], "is no file of a submitted run")
    if not _plain_transcripts(path):
        yield Wrong(TRANSCRIPTS, "holds something else than transcripts")
        return
    found, promised = hashes(path), listed.sha256
    for name in sorted(found.keys() | promised.keys()):
        if found.get(name) != promised.get(name):
            text = f"sha256 is {found.get(name)}, {MANIFEST} says {promised.get(name)}"
            yield Wrong(name, text)


def hashes(path: Path) -> dict[str, str]:
    """Return the SHA-256 of those `HASHED` a run has, and one over its transcripts."""
    found = {name: sha for name in HASHED if (sha := file_sha(path / name))}
    names = transcripts(path)
    if names:
        lines = [f"{name} {file_sha(path / TRANSCRIPTS / name)}\n" for name in names]
        found[TRANSCRIPTS] = hashlib.sha256("".join(lines).encode()).hexdigest()
    return found


def same_files(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two runs have the same records, whatever lies beside them."""
    return all(one.get(name) == other.get(name) for name in HASHED)


def file_sha(path: Path) -> str:
    """Return the SHA-256 of a file, empty if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def transcripts(path: Path) -> list[str]:
    """Return the names of a run's transcripts."""
    return sorted(each.name for each in (path / TRANSCRIPTS).glob("*.json"))


def is_plain(path: Path) -> bool:
    """Whether this is a file, and neither it nor its folder a link to somewhere else."""
    return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()


def _plain_transcripts(path: Path) -> bool:
    folder = path / TRANSCRIPTS
    if not folder.exists():
        return True
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = list(folder.iterdir())
    ours = all(name.suffix == ".json" and name.name.isascii() for name in names)
    return ours and all(is_plain(name) for name in names)
