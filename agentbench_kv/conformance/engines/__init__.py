"""The engine conformance suite: what every engine must do, written once.

Every engine is driven through its plain contract (`driver`) on tiny models (`models`). What it did
(`traces`, `kept`) is compared with the embedded engine (`comparing`) and with a model that is blind
to what was evicted (`exactness`); `endings`, `pressure`, `leaks` and `restart` check the edges.
`suite` puts it together.
"""

from agentbench_kv.conformance.engines.suite import METHODS, OPTIONAL, QUICK, engine_suite

__all__ = ["METHODS", "OPTIONAL", "QUICK", "engine_suite"]
