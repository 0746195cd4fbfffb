"""What counts as a value, and which answers are right."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentbench_kv.adapters.probe.values import contains, has_length, is_exact, normalise, pieces


@pytest.mark.parametrize(
    ("answer", "value", "exact", "held"),
    [
        ("561.05", "561.05", True, True),
        ('"561.05"', "561.05", True, True),
        ("561.050", "561.05", True, True),
        ("2,772.44", "2772.44", True, True),
        ("4", "4.0", True, True),
        ("4.0.", "4", True, True),
        ("Full  Size", "full size", True, True),
        ("`#W2378156`", "#w2378156", True, True),
        ('{"price": 561.05}', "561.05", False, True),
        ("<tool_response>\n#W2378156", "#W2378156", False, True),
        ("The id is L1002.", "L1002", False, True),
        ("19122", "9122", False, False),
        ("2012", "12", False, False),
        ("12.5", "12", False, False),
        ("1.12", "12", False, False),
        ("2024-05-15", "15", False, False),
        ("L10023", "L1002", False, False),
        ("007", "7", False, False),
        ("1.10.0", "1.1", False, False),
        ("", "12", False, False),
        ("1,23", "123", False, False),
        ("archive/log.txt", "log.txt", False, False),
        ('["workspace"]', "workspace", False, True),
    ],
)
def test_right_answers(answer: str, value: str, exact: bool, held: bool) -> None:
    assert (is_exact(answer, value), contains(answer, value)) == (exact, held)


@example("0 .")
@example("A`\u0300")
@given(st.text(max_size=30))
def test_an_exact_answer_holds_its_value(text: str) -> None:
    assert is_exact(text, text)
    assert normalise(normalise(text)) == normalise(text)
    if normalise(text):
        assert contains(f"so: {normalise(text)}\n", text)


def test_lengths_are_about_those_of_tokens() -> None:
    assert [pieces(text) for text in ("7", "42", "#W2378156", "final_report.pdf")] == [1, 2, 9, 6]
    assert [has_length(text) for text in ("7", "42", "cat", "1" * 13, "a b " * 9)] == [
        *(False, True, False, False, False),
    ]
