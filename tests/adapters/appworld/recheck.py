"""Checks recorded sessions with AppWorld alone; runs in its environment.

`python recheck.py ROOT FILE`, where ROOT has AppWorld's data and FILE is a JSON list of
{"task", "calls"}; prints whether each passes. Every call is made again in AppWorld's own class, and
nothing of it is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["APPWORLD_ROOT"] = os.environ["APPWORLD_CACHE"] = sys.argv[1]

from appworld import AppWorld


def passes(number: int, played: dict[str, Any]) -> bool:
    with AppWorld(task_id=played["task"], experiment_name=f"again-{number}") as world:
        for app, api, arguments in played["calls"]:
            with contextlib.suppress(Exception):  # as an agent reads of an error and goes on
                world.apis[app][api](**arguments)
        world.execute("pass")  # it writes the state that is checked
        return bool(world.evaluate().success)


if __name__ == "__main__":
    recorded = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    with ProcessPoolExecutor(4) as several:
        found = list(several.map(passes, range(len(recorded)), recorded))
    sys.stdout.write("\n" + json.dumps(found) + "\n")
