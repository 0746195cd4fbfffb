"""Options that the analyses share, and how their texts are read."""

from __future__ import annotations

import re

from agentbench_kv.budget import Budget
from agentbench_kv.cli.options import PATH, F, many, option
from agentbench_kv.errors import UsageError

_CAPTURE = "Capture file, .npz or .safetensors (docs/analysis.md)"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PLACE = re.compile(r"(\d+):(\d+)")

one_capture = option("--capture", f"{_CAPTURE}.", PATH, required=True)
many_captures = many(
    "--capture captures", f"{_CAPTURE}; repeatable, results are pooled.", PATH, required=True
)
layer_option = many(
    "--layer layers", "Only this layer of the capture; repeatable. [default: all]", int
)
trace_option = option("--trace", "Trace file of a session.", PATH)
print_option = option("--json as_json", "Print one JSON document.", is_flag=True)


def outputs(command: F) -> F:
    """Add `--plot` and `--json`."""
    plot = option("--plot", "Also draw it: a .png or .svg file.", PATH)
    return plot(print_option(command))


def read_tokens(text: str) -> int:
    """Read a budget in tokens, `3072` or `3k`."""
    tokens = Budget.parse(text).tokens
    if tokens is None:
        raise UsageError(f"budget {text!r}: expected a number of tokens, e.g. 3072 or 3k")
    return tokens


def read_place(text: str) -> tuple[int, int]:
    """Read `LAYER:HEAD`."""
    match = _PLACE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--at {text!r}: expected LAYER:HEAD, e.g. --at 24:32")
    return int(match[1]), int(match[2])


def read_positions(text: str) -> list[int]:
    """Read positions and inclusive ranges, `120-135,200`."""
    positions: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UsageError(
                f"--positions {part.strip()!r}: expected positions and ranges, e.g. 120-135,200"
            )
        positions += range(first, last + 1)
    return positions
