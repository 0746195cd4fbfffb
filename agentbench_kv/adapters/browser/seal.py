"""Transcripts that must not be in plain text where a crawler or a report could pick them up.

This hides, it does not protect: whoever has this file can open them. It is what the authors of
BrowseComp ask for, so that their questions do not end up in training data.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

SEALED = "sealed"
_PHRASE = b"kvbench: benchmark data, not to be published in plain text"


def seal(data: Any) -> dict[str, str]:
    """Return JSON data as an object whose text means nothing to a reader."""
    plain = json.dumps(data, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return {SEALED: base64.b64encode(_mixed(plain)).decode()}


def unseal(data: Any) -> Any:
    """Return what `seal` was given; anything else comes back as it is."""
    if not (isinstance(data, dict) and set(data) == {SEALED}):
        return data
    return json.loads(_mixed(base64.b64decode(data[SEALED])))


def _mixed(data: bytes) -> bytes:
    stream = hashlib.shake_256(_PHRASE).digest(len(data))
    return bytes(a ^ b for a, b in zip(data, stream, strict=True))
