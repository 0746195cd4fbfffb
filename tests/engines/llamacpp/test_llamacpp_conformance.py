"""The engine conformance suite on llama.cpp: what `kvbench selftest engine llamacpp` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentbench_kv.conformance.engines import engine_suite
from agentbench_kv.conformance.engines.fixture import FAMILIES

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_suite(family: str, llamacpp_python: Path) -> None:  # noqa: ARG001
    results = engine_suite("llamacpp", families=[family])
    found = [(part, each) for part, checks in results.items() for each in checks]
    assert [(part, each.name, each.detail) for part, each in found if not each.ok] == []
    assert len(found) > 50
