"""Conformance suites for plug-ins: what every method, engine and task must do.

Plain functions without a test framework; each returns a list of `CheckResult`.
"""

from __future__ import annotations

from agentbench_kv.conformance.result import CheckResult

__all__ = ["CheckResult"]
