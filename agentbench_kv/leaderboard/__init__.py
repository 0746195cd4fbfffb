"""Submissions to a leaderboard: packing, checking, adding, and playing parts of them again."""

from agentbench_kv.leaderboard.checking import RunVerdict, Verdict, validate
from agentbench_kv.leaderboard.evidence import Finding
from agentbench_kv.leaderboard.rerunning import rerun
from agentbench_kv.leaderboard.submitting import add, pack

__all__ = ["Finding", "RunVerdict", "Verdict", "add", "pack", "rerun", "validate"]
