"""Budgets in every spelling."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("3072", 3072), (" 64 ", 64), ("3k", 3000), ("1.5K", 1500), (512, 512), ("1", 1)],
)
def test_tokens(text, tokens):
    assert Budget.parse(text) == Budget(tokens=tokens)
    assert Budget.parse(text).at(10) == tokens


@pytest.mark.parametrize("text", ["25%", "12.5%", "100%", "0.1%"])
def test_shares_read_back(text):
    assert Budget.parse(text).spelled == text
    assert Budget.parse(Budget.parse(text).spelled) == Budget.parse(text)


@pytest.mark.parametrize(
    "text",
    ["0", "-3", "0%", "101%", "many", "", "3kk", "1.5", "0.0001k", "25 %", "nan", "1e3", "%"],
)
def test_nonsense_is_one_line(text):
    with pytest.raises(UsageError, match="expected a number of tokens") as error:
        Budget.parse(text)
    assert "\n" not in str(error.value)


@given(tenths=st.integers(1, 1000), logical=st.integers(0, 100_000))
def test_a_share_is_rounded_up_exactly(tenths, logical):
    budget = Budget.parse(f"{tenths / 10}%")
    assert budget.at(logical) == max(1, ceil(Fraction(tenths, 1000) * logical))
