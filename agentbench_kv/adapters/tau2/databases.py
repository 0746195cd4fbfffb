"""Databases parsed once: every simulation begins from a fresh copy, taken from memory."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

from tau2.environment.db import DB


def keep_parsed() -> None:
    """Let `DB.load` parse and validate each file once, and hand out copies after that.

    A simulation and its check load the domain's files three times; the airline's take seconds.
    """
    load = DB.load.__func__
    packed: dict[tuple[str, str], bytes] = {}
    lock = threading.Lock()

    def load_copy(cls: type[DB], path: Any) -> Any:
        key = (cls.__qualname__, str(path))
        with lock:
            if key not in packed:
                packed[key] = pickle.dumps(load(cls, path), protocol=pickle.HIGHEST_PROTOCOL)
            # While that many objects are made, the collector looks at all of them again and again:
            # five times the work. (The bytes are this process's own.)
            gc.disable()
            try:
                return pickle.loads(packed[key])
            finally:
                gc.enable()

    DB.load = classmethod(load_copy)
