"""What `serving_shapes.py` measured, in one file that can be kept, and its folder again.

Every JSON document of the folder is a line, with its path. Left out are what can be made again
(traces, summaries), logs, and folders of the machine in paths.
"""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path, PurePosixPath

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic

_LEFT_OUT = ("summary.json",)
# An absolute path at the beginning of a text or behind a space or a bracket, without its last part.
_FOLDERS = re.compile(r"(?<![^\s\"(=])/(?:[^\s\"()/]+/)+(?=[^\s\"()/])")


def pack(folder: Path, file: Path) -> int:
    """Write a folder's documents into a file; return how many there are."""
    lines = []
    for path in sorted(folder.rglob("*.json")):
        if path.name not in _LEFT_OUT:
            document = json.loads(_FOLDERS.sub("", path.read_text(encoding="utf-8")))
            lines.append({"path": str(path.relative_to(folder)), "document": document})
    if not lines:
        raise UsageError(f"{folder} holds no JSON document")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomic(file, lzma.compress(text.encode()))
    return len(lines)


def unpack(file: Path, folder: Path) -> None:
    """Write a file's documents into a folder, from which tables can be made."""
    try:
        lines = [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    for line in lines:
        path = PurePosixPath(line["path"])
        if path.is_absolute() or ".." in path.parts:
            raise UsageError(f"{file}: {path} is outside of the folder")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, json_bytes(line["document"], indent=2))
