"""Answers that are held to a grammar, while rows are evicted and other sessions are not held."""

from __future__ import annotations

import re
from functools import partial

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import Driver, SessionTrace, TurnPlan
from agentbench_kv.conformance.engines.comparison import (
    accounting_problem,
    compare,
    reason_problem,
    token_problem,
)
from agentbench_kv.conformance.engines.fixture import Sessions, prompt
from agentbench_kv.engines.base import Capability
from agentbench_kv.phases import TokenCodec

_NUMBERS = 'start: "[" NUMBER (", " NUMBER){14} "]"\nNUMBER: /[1-9][0-9][0-9]/'
# As the gateway writes them, without the white space that versions of llguidance differ in.
_JSON = (
    "start: <[{opens}]> THOUGHT <[{closes}]> answer (<[{end}]>)?\nTHOUGHT: /[a-z ]{{20}}/\n"
    'answer: %json {{"type": "object", "properties": {{"a": {{"type": "array", "items": '
    '{{"type": "integer", "minimum": 100, "maximum": 999}}, "minItems": 9, "maxItems": 9}}, '
    '"b": {{"enum": ["left", "right"]}}}}, "required": ["a", "b"], "additionalProperties": false, '
    '"x-guidance": {{"whitespace_flexible": false}}}}'
)
_WHOLE = re.compile(r"\[[1-9]\d\d(, [1-9]\d\d){14}\]<\|im_end\|>")
_FREE = TurnPlan(prompt(40, 64), 45)
_HELD = "held"


def check_forms(driver: Driver, reference: Driver, codec: TokenCodec) -> CheckResult:
    """Check that tokens are the reference's, which draws the best that the grammar allows.

    Of numbers one answer is whole and one cut off; one is JSON. All go on without a grammar.
    """
    name = "answers are held to a grammar"
    if Capability.CONSTRAIN not in driver.engine.info.capabilities:
        return CheckResult(name, True, "the engine does not constrain", skipped=True)
    ends = frozenset(driver.engine.info.eos_token_ids)
    whole = TurnPlan(prompt(120, 61), 200, stop_ids=ends, grammar=_NUMBERS)
    cut = TurnPlan(prompt(90, 62), 40, stop_ids=ends, grammar=_NUMBERS)
    sessions: Sessions = {
        _HELD: [whole, _FREE],
        "cut off": [cut, _FREE],
        "JSON": [TurnPlan(prompt(70, 65), 200, stop_ids=ends, grammar=_json(codec, ends)), _FREE],
        "free": [TurnPlan(prompt(130, 63), 60), _FREE],
    }
    expected, found = reference.play(sessions), driver.play(sessions)
    said = codec.decode(found[_HELD].turns[0]) if found[_HELD].turns else ""
    if found[_HELD].error is None and not _WHOLE.fullmatch(said):
        return CheckResult(name, False, f"the answer is {said!r}")
    # As shipped, an engine keeps no accounts.
    return compare(name, expected, found, partial(_problem, counted=driver.method.name != "full"))


def _json(codec: TokenCodec, ends: frozenset[int]) -> str:
    marks = {"opens": codec.added["<think>"], "closes": codec.added["</think>"]}
    return _JSON.format(**marks, end=min(ends))


def _problem(expected: SessionTrace, found: SessionTrace, *, counted: bool) -> str:
    problem = token_problem(expected, found) or reason_problem(expected, found)
    return problem or (accounting_problem(expected, found) if counted else "")
