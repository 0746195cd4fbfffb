"""Submissions to a leaderboard: packing, checking, adding, and playing parts of them again."""

from agentbench_kv.leaderboard.adding import add
from agentbench_kv.leaderboard.checking import RunVerdict, Verdict, validate
from agentbench_kv.leaderboard.findings import Finding
from agentbench_kv.leaderboard.packing import pack
from agentbench_kv.leaderboard.rerunning import rerun

__all__ = ["Finding", "RunVerdict", "Verdict", "add", "pack", "rerun", "validate"]
