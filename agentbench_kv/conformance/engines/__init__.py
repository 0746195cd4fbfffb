"""The engine conformance suite: what every engine must do, written once.

Every engine is driven through its plain contract (`driver`) on tiny models (`fixture`). What it did
is compared with the embedded engine and with a model that is blind to what was evicted
(`comparison`); `checks` look at the edges: endings, cancels, small pools, leaks, restarts.
"""

from agentbench_kv.conformance.engines.suite import METHODS, OPTIONAL, QUICK, engine_suite

__all__ = ["METHODS", "OPTIONAL", "QUICK", "engine_suite"]
