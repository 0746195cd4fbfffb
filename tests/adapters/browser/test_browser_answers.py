"""EM-norm by hand: what counts as the same answer, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.adapters.browser.answers import final_answer, matches, normalized

SAME = [
    ("Jane Ballou", "jane  ballou."),
    ("The Battle of Hastings", "battle of Hastings"),
    ("“Ghost”", "Ghost"),
    ("Luka Dončić", "Luka Doncic"),
    ("O'Brien", "O\u2019Brien"),
    ("U.S.A.", "USA"),
    ("Simon & Garfunkel", "Simon and Garfunkel"),
    ("26,751", "26751"),
    ("1,234,567.50", "1234567.5"),
    ("007", "7"),
    ("10.80", "10.8"),
    ("-5.0", "\u22125"),
    ("$3.5 million", "3,500,000"),
    ("35%", "35 per cent"),
    ("Fourteen", "14"),
    ("twenty-five years", "25 years"),
    ("two hundred and five", "205"),
    ("one thousand nine hundred eighty four", "1984"),
    ("thirty-seventh", "37th"),
    ("the twelfth", "12th"),
    ("Second World War", "2nd World War"),
    ("July 4, 1776", "4 July 1776"),
    ("the 4th of July, 1776", "1776-07-04"),
    ("Jul. 4th 1776", "July 4 1776"),
    ("March 1990", "March, 1990"),
    ("3rd of May", "May 3"),
    ("1999\u20132000", "1999-2000"),
    ("first-class", "1st class"),
    ("....-", " ....- "),
]
DIFFERENT = [
    ("14", "15"),
    ("-5", "5"),
    ("35", "35%"),
    ("45", "45 years"),
    ("1.5", "15"),
    ("1,5", "15"),
    ("37th", "37"),
    ("July 4, 1776", "July 5, 1776"),
    ("July 1776", "July 4, 1776"),
    ("4/7/1776", "July 4, 1776"),
    ("Nineteen Eighty-Four", "1984"),
    ("Ghost", "Ghosts"),
    ("Jane Ballou or Ann Ballou", "Jane Ballou"),
    ("", "Jane"),
    ("", ""),
    ("...", "!!!"),
]


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_the_same_answer(answer: str, gold: str) -> None:
    assert matches(answer, gold)
    assert matches(gold, answer)


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_another_answer(answer: str, gold: str) -> None:
    assert not matches(answer, gold)
    assert not matches(gold, answer)


@given(st.text(max_size=60))
def test_every_text_with_words_matches_itself_in_any_case(text: str) -> None:
    assert matches(text, text) == bool(normalized(text))


@given(st.integers(0, 10**9), st.integers(1, 9999))
def test_separators_do_not_change_a_number(value: int, other: int) -> None:
    assert matches(f"{value:,}", str(value))
    assert not matches(f"{value + other:,}", str(value))


@pytest.mark.parametrize(
    ("text", "answer", "marked"),
    [
        ("I looked.\nFinal answer: Jane Ballou", "Jane Ballou", True),
        ("**Final Answer:** -5\n\nBecause of that.", "-5", True),
        ("Final answer: one\nFinal answer: (b) two", "(b) two", True),
        ("Exact Answer: 1936", "1936", True),
        ("It is 1936.", "It is 1936.", False),
        ("Final answer:", "", True),
    ],
)
def test_the_final_answer_is_found(text: str, answer: str, marked: bool) -> None:
    assert final_answer(text) == (answer, marked)


@pytest.mark.parametrize("number", ["1" * 5000, "1." + "1" * 5000, "\u0661" * 5000])
@pytest.mark.parametrize("after", ["", " million", "th"])
def test_a_number_that_no_computer_word_holds_is_a_wrong_answer(number: str, after: str) -> None:
    assert not matches(f"{number}{after}", "two million")
