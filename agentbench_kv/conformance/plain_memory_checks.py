"""Memories of plain text: what a bank was told it finds, no other bank does, and it forgets.

What is packed is found again by a later store, which goes on from it.

The package is the real one, in its environment; a server on this machine plays model and encoder.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from typing import Any

from agentbench_kv.adapters.base import PastSession
from agentbench_kv.conformance import CheckResult
from agentbench_kv.environments import list_environments
from agentbench_kv.environments.memory_probe import FACTS, QUESTION, SIZE, Handler
from agentbench_kv.gateway.recall import Recollection
from agentbench_kv.memories.store import PackageStore
from agentbench_kv.methods.memory.plain import PlainMemory

_SAID = "Caroline: I went to a support group yesterday."


class _Silent(Handler):
    """A model that answers nothing that anybody asked for."""

    form = '{"sorry": '


def check_plain_memory(method: PlainMemory) -> list[CheckResult]:
    """Tell a memory a fact and ask for it; skipped where its environment is not built."""
    state = next(each for each in list_environments() if each.name == method.environment)
    if state.state != "ready":
        why = f"{method.environment} {state.state}; {state.mend}"
        return [CheckResult("remembers", True, why, skipped=True)]
    small = replace(method, encoder="hash", topk=4)
    past = PastSession(
        [{"role": "system", "content": "Listen."}, {"role": "user", "content": _SAID}], [None, 7]
    )
    with _served(Handler) as url, PackageStore(small, url, "scripted", SIZE) as store:
        failed = store.add("one", "s1", past)
        store.add("other", "s2", PastSession([], []))
        found = store.search("one", "s1", QUESTION)
        elsewhere = store.search("other", "s2", QUESTION)
        packed = io.BytesIO()
        store.pack("one", packed)
        store.add("one", "s1", replace(past, numbers=[None, 8]))
        both = store.search("one", "s1", QUESTION)
        store.drop("one")
        afterwards = store.search("one", "s1", QUESTION)
    packed.seek(0)
    with _served(Handler) as url, PackageStore(small, url, "scripted", SIZE) as store:
        store.unpack("later", packed)
        again = store.search("later", "s1", QUESTION)
        store.add("later", "s1", replace(past, numbers=[None, 8]))
        goes_on = store.search("later", "s1", QUESTION)
    with _served(_Silent) as url, PackageStore(small, url, "scripted", SIZE) as store:
        lost = store.add("one", "s1", past)
        nothing = store.search("one", "s1", QUESTION)
    texts = [each.text for each in found]
    named = {number for each in found for number in each.messages}
    return [
        CheckResult("finds what it was told", failed == 0 and FACTS[0] in texts, f"found {texts}"),
        CheckResult("names the messages", named == {7}, f"named {sorted(named)}"),
        CheckResult("another bank knows nothing of it", not elsewhere),
        CheckResult("forgets", not afterwards),
        CheckResult("is the same unpacked", {*again} == {*found}, _differing(again, found)),
        CheckResult("and goes on", {*goes_on} == {*both}, _differing(goes_on, both)),
        CheckResult("an answer of no use leaves nothing", not nothing, f"found {nothing}"),
        CheckResult("and is counted", lost == 1, f"{lost} parts lost"),
    ]


def _differing(found: Sequence[Recollection], wanted: Sequence[Recollection]) -> str:
    differing = sorted(each.text for each in {*found} ^ {*wanted})
    return f"not in both: {differing}" if differing else ""


@contextmanager
def _served(handler: type[Any]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
