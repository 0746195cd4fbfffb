"""A load generator for servers of language models: sessions of several turns, timed by the client.

The load generator knows HTTP and token ids, nothing of engines and methods, and is light enough to
run in a process of its own (`python -m agentbench_kv.serving_bench`), so that it takes no time from
a server that runs in Python too.
"""

from __future__ import annotations
