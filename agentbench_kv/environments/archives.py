"""Unpacking archives whose members may not be ours."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath


def unpack_tar(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract what stays within a folder; TarError for what does not, and for devices.

    Python has filters from 3.11.4 on. Before it, links are refused, too.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    for member in archive:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is no file or folder within the archive")
        archive.extract(member, folder)
