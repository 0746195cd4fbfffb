"""Options of the scripts that measure many methods on recorded sessions of a real model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from agentbench_kv.budget import Budget
from agentbench_kv.run.fidelity import FidelityArm, fidelity_arms


def shared_options(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the model, the methods, their budgets and settings, and the output."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tool-syntax", default="auto")
    parser.add_argument("--method", action="append", required=True)
    parser.add_argument("--budget", action="append", required=True)
    parser.add_argument("--set", action="append", default=[], dest="pairs")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="JSON lines, which are gone on with by session; other arms need another file",
    )
    return parser


def asking_options(text: str | None, questions: int) -> argparse.ArgumentParser:
    """Return a parser of scripts that ask questions, so many of a session if nothing is said."""
    parser = shared_options(text)
    parser.add_argument("--questions", type=int, default=questions)
    parser.add_argument("--answer-tokens", type=int, default=32)
    return parser


def chosen_arms(given: argparse.Namespace) -> list[FidelityArm]:
    settings = dict(pair.split("=", 1) for pair in given.pairs)
    return fidelity_arms(given.method, [Budget.parse(each) for each in given.budget], settings)


def sessions_done(out: Path) -> set[str]:
    """Return the sessions that the output has; a line that was cut off is removed."""
    text = out.read_text() if out.exists() else ""
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        out.write_text(text)
    return {json.loads(line)["session"] for line in text.splitlines()}
