"""Submissions to a leaderboard: packing, checking, adding, and playing parts of them again."""

from agentbench_kv.leaderboard.add import add
from agentbench_kv.leaderboard.findings import Finding
from agentbench_kv.leaderboard.pack import pack
from agentbench_kv.leaderboard.rerun import rerun
from agentbench_kv.leaderboard.validate import RunVerdict, Verdict, validate

__all__ = ["Finding", "RunVerdict", "Verdict", "add", "pack", "rerun", "validate"]
