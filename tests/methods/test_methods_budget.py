"""What a share of the length comes to for methods that always keep some tokens."""

from __future__ import annotations

import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.registry import make_method


def test_a_share_is_never_below_what_is_always_kept():
    method = make_method("snapkv", "10%")
    assert [method.budget_at(now) for now in (1, 100, 330, 331, 1000)] == [33, 33, 33, 34, 100]
    sinks = make_method("streamingllm", "1%")
    assert [sinks.budget_at(now) for now in (1, 100, 1000)] == [5, 5, 10]


def test_a_share_of_h2o_grows_its_recent_half():
    method = make_method("h2o", "20%")
    for now in (10, 100, 1005):
        size = method.budget_at(now)
        assert size == max(1, -(-now // 5))
        assert method.recent_kept(size) == size // 2


def test_a_share_that_would_only_keep_recent_tokens_is_refused():
    """It would have no budget above what is always kept, however long the session."""
    with pytest.raises(UsageError, match="recent"):
        make_method("h2o", "25%", {"recent_share": "1"})
    assert make_method("h2o", "25%", {"recent_share": "0.9"}).budget_at(1000) == 250
