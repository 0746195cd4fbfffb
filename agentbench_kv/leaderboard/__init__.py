"""Submissions to a leaderboard: packing, checking, adding, and playing parts of them again."""

from agentbench_kv.leaderboard.checking import RunVerdict, SubmissionVerdict, validate
from agentbench_kv.leaderboard.evidence import Fault
from agentbench_kv.leaderboard.rerunning import rerun
from agentbench_kv.leaderboard.submitting import add, pack

__all__ = ["Fault", "RunVerdict", "SubmissionVerdict", "add", "pack", "rerun", "validate"]
