"""What a memory of plain text holds of a past, kept until the trial that needs it has ended.

A checkpoint is a gzip file: a line of JSON, then the bank as its store packs it. There is one for
a trial, behind the last past session that was taken in whole.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

from agentbench_kv.adapters.base import PastSession
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway.memory import Remembered

_FORMAT = "kvbench checkpoint 1"
_CHUNK = 1 << 20
_SHOWN = 40  # characters of a wrong value
_DAMAGED = (
    EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError,
    ValueError, KeyError, TypeError, AttributeError,
)  # fmt: skip
_log = logging.getLogger(__name__)


class CheckpointFolder(Protocol):
    """Where checkpoints are. A `results.store.RunDir` is one."""

    def checkpoint(self, name: str) -> Path:
        """Return where a checkpoint is, if there is one."""
        ...

    def keeping(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Write a checkpoint, which replaces the one before when the block ends well."""
        ...


class PackingStore(Protocol):
    """A store whose banks can be put into a file."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of all that writes banks."""
        ...

    def pack(self, bank: str, file: IO[bytes]) -> None:
        """Write all of a bank to a file."""
        ...

    def unpack(self, bank: str, file: IO[bytes]) -> None:
        """Fill a new bank with what `pack` wrote; the file is trusted, and may be damaged."""
        ...

    def drop(self, bank: str) -> None:
        """Forget all of a bank."""
        ...


class TakenIn(NamedTuple):
    """A past session that a bank holds."""

    sha256: str
    took: Remembered


class Checkpoints:
    """The checkpoints of a run's trials.

    `named` gives a bank's checkpoint a name, the same for every attempt at a trial; `about` is what
    banks depend on besides the run's spec and the store's versions: one that was kept with anything
    else is not gone on from.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        named: Callable[[str], str],
        about: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._named = named
        self._about = dict(about)

    def path(self, bank: str) -> Path:
        return self._folder.checkpoint(self._named(bank))

    def load(self, bank: str, store: PackingStore) -> list[TakenIn]:
        """Fill a new bank with what an interrupted trial kept; return the past sessions in it.

        None are, and a line says why, if the checkpoint is damaged or was kept under other
        conditions. PrerequisiteError if it cannot be read or unpacked here.
        """
        path = self.path(bank)
        if not path.exists():
            return []
        try:
            with gzip.open(path) as file:
                taken = self._read(file.readline(), store)
                store.unpack(bank, cast("IO[bytes]", file))
                while file.read(_CHUNK):  # what it should add up to stands at its end
                    pass
        except _DAMAGED as error:
            store.drop(bank)
            why = str(error).strip() or type(error).__name__
            words = "kvbench: %s is not gone on from, and the past is told from its beginning: %s"
            _log.warning(words, path, why)
            return []
        except OSError as error:
            why = error.strerror or str(error)
            raise PrerequisiteError(
                f"cannot unpack {path}: {why}; mend that and run again"
            ) from error
        words = "kvbench: %s: an interrupted run took in %d past sessions; it goes on behind them"
        _log.info(words, path.name, len(taken))
        return taken

    def save(self, bank: str, store: PackingStore, taken: Sequence[TakenIn]) -> None:
        """Keep a bank, which holds these past sessions, in place of what was kept of it before."""
        about = {**self._about, **store.versions()}
        told = [[each.sha256, asdict(each.took)] for each in taken]
        head = json.dumps({"format": _FORMAT, "about": about, "told": told})
        with (
            self._folder.keeping(self._named(bank)) as file,
            gzip.GzipFile("", "wb", 1, file, 0) as packed,
        ):
            packed.write(head.encode() + b"\n")
            store.pack(bank, cast("IO[bytes]", packed))

    def _read(self, head: bytes, store: PackingStore) -> list[TakenIn]:
        """Return the past sessions that a checkpoint holds; ValueError if it is of no use here."""
        said = json.loads(head)
        if said.get("format") != _FORMAT:
            raise ValueError("it is of another format")
        old, new = said["about"], {**self._about, **store.versions()}
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                raise ValueError(f"{name} is {old.get(name)} there and {new.get(name)} here")
        return [TakenIn(str(sha256), _took(took)) for sha256, took in said["told"]]


def _took(said: Mapping[str, Any]) -> Remembered:
    """Return what a checkpoint says a past session took; ValueError if these are no amounts."""
    for name, value in said.items():
        kinds = int | float if name in ("seconds", "files_s") else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
            raise ValueError(f"{name} of a past session is {str(value)[:_SHOWN]!r}, no amount")
    return Remembered(**said)


class Telling:
    """The past sessions that are told to a bank, one after the other, some of which it may hold."""

    def __init__(self, held: Sequence[TakenIn], path: Path | None) -> None:
        self._held = held  # from a checkpoint
        self._path = path
        self.taken: list[TakenIn] = []

    def find(self, past: PastSession) -> Remembered | None:
        """Return what a past session took, if the bank holds it already.

        UsageError if it holds another one in its place.
        """
        number = len(self.taken)
        if number >= len(self._held):
            return None
        held = self._held[number]
        if held.sha256 != _sha(past):
            self._refuse(f"past session {number + 1} is another one there")
        self.taken.append(held)
        return held.took

    def add(self, past: PastSession, took: Remembered) -> None:
        self.taken.append(TakenIn(_sha(past), took))

    def check_ended(self) -> None:
        """Refuse to ask a bank that holds more than it was told of: UsageError."""
        if len(self.taken) < len(self._held):
            self._refuse(
                f"it holds {len(self._held)} past sessions, and {len(self.taken)} are told"
            )

    def _refuse(self, why: str) -> None:
        raise UsageError(
            f"{self._path}: {why}, so the task's data have changed since the run began; choose "
            "another --out, or delete that file"
        )


def _sha(past: PastSession) -> str:
    when = past.when.isoformat() if past.when else None
    told = json.dumps([past.messages, past.numbers, when], sort_keys=True, default=str)
    return hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest()
