"""The backend on a made model: what moves in the cache, and the traps of llama.cpp's memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHECKS = Path(__file__).with_name("backend_checks.py")
SIGABRT = -6

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(
    llamacpp_python: Path,
    backend_environment: Callable[[], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("made")

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with backend_environment() as environment:
            return subprocess.run(
                (str(llamacpp_python), str(CHECKS), str(folder), *arguments),
                env=environment | {"OMP_NUM_THREADS": "1"} | variables,
                capture_output=True,
                text=True,
            )

    return start


@pytest.fixture(scope="module", params=["on", "off"])
def checks(
    run: Callable[..., subprocess.CompletedProcess[str]], request: pytest.FixtureRequest
) -> dict[str, Any]:
    """All results, with the plug-in and with what stands in for it where there is no compiler."""
    done = run(KVBENCH_LLAMACPP_PLUGIN=request.param)
    assert done.returncode == 0, done.stderr
    assert request.param == "on" or "handled from Python" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("layout", ["0False", "1False", "0True", "1True", "8True"])
def test_a_block_restored_where_it_was_leaves_no_trace(checks: dict[str, Any], layout: str) -> None:
    found = checks["restore_same_position"][layout]
    assert found["same cells"]
    assert found["difference"] == 0
    assert found["lost"] > 0.1


def test_a_block_restored_to_other_cells(checks: dict[str, Any]) -> None:
    found = checks["restore_other_cells"]
    assert found["moved"]
    assert found["difference"] <= 1e-5


def test_rotated_keys(checks: dict[str, Any]) -> None:
    found = checks["rotated_keys"]
    assert found["moved"]
    assert found["numpy"] <= 1e-5
    assert found["fresh"] <= 1e-4


def test_keys_of_scaled_rope_turn_as_the_model_turns_them(checks: dict[str, Any]) -> None:
    found = checks["scaled_rope"]
    assert found["read"] <= 1e-6
    assert found["fresh"] <= 1e-4
    assert found["unturned"] > 1


def test_attention_rows_sum_to_one_and_are_those_of_the_cached_keys(checks: dict[str, Any]) -> None:
    found = checks["attention_rows"]
    assert found["sums"] <= 1e-6
    assert found["beyond"] == 0
    assert found["numpy"] <= 1e-6


def test_sets_that_differ_between_heads(checks: dict[str, Any]) -> None:
    assert checks["per_head_sets"]["numpy"] <= 1e-5


def test_one_set_for_all_heads_is_an_eviction_of_tokens(checks: dict[str, Any]) -> None:
    assert checks["one_set_for_all_heads"]["difference"] <= 1e-5


@pytest.mark.parametrize("layout", ["FalseFalse", "FalseTrue", "TrueFalse", "TrueTrue"])
def test_compaction_moves_rows_bit_for_bit_in_both_value_layouts(
    checks: dict[str, Any], layout: str
) -> None:
    found = checks["compaction_bytes"][layout]
    assert found["sets"]
    assert found["rows"]
    assert found["in order"] == layout.endswith("True")


def test_both_watches_see_the_same(checks: dict[str, Any]) -> None:
    found = checks["watches_agree"]
    if not found["native"]:
        pytest.skip("the plug-in could not be built here")
    assert found["same"]


@pytest.mark.parametrize("form", ["0False", "0True", "1False", "1True"])
def test_the_plug_in_turns_keys_as_the_kernels_do(checks: dict[str, Any], form: str) -> None:
    found = checks["plugin_turns_as_the_kernels"]
    if not found["native"]:
        pytest.skip("without the plug-in, the kernels turn them")
    # float16: one unit in the last place of numbers below 8.
    assert found["forms"][form]["difference"] <= (1e-5 if form.startswith("0") else 2**-8)
    assert found["forms"][form]["turned"] > 1
    assert found["forms"][form]["moved"]


def test_the_plug_in_loads_a_block_as_python_does(checks: dict[str, Any]) -> None:
    assert checks["plugin_loads_as_python"] == {"same": True, "intact": True, "cells": 100}


def test_the_plug_in_is_built_once(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Every start finds the package through another link; the library is the same."""
    for _ in range(2):
        done = run("plugin_loads_as_python", KVBENCH_KERNEL_CACHE=str(tmp_path))
        assert done.returncode == 0, done.stderr
    if "handled from Python" in done.stderr:
        pytest.skip("the plug-in could not be built here")
    assert len(list(tmp_path.glob("kvb-llamacpp-*.so"))) == 1


def test_trap_1_a_cache_that_is_not_unified_aborts(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run("abort")
    assert done.returncode == SIGABRT
    assert "seq_cp" in done.stderr


def test_trap_2_a_block_saved_while_a_shift_is_pending(checks: dict[str, Any]) -> None:
    found = checks["trap_2_saving_before_a_shift_is_done"]
    assert found["pending"] > 1
    assert found["ours"] <= 1e-5


def test_trap_3_a_shift_of_shared_cells(checks: dict[str, Any]) -> None:
    found = checks["trap_3_shared_cells"]
    assert found["moved"] == 106
    assert found["untouched"]
    assert found["last"] == 99


def test_trap_4_the_last_token_may_leave(checks: dict[str, Any]) -> None:
    found = checks["trap_4_the_last_token_evicted"]
    assert found["refused"]
    assert found["masked"] <= 1e-5
    assert found["back"] <= 1e-5
    assert found["labels"]


def test_trap_5_a_load_keeps_the_session(checks: dict[str, Any]) -> None:
    assert checks["trap_5_loading_empties_its_target"] == {"raw": 100, "ours": 400}


def test_trap_9_quantised_rows_are_not_rotated(checks: dict[str, Any]) -> None:
    assert checks["trap_9_quantised_rows"]["refused"]


def test_trap_12_parking_closes_holes(checks: dict[str, Any]) -> None:
    assert checks["trap_12_holes"] == {"before": 399, "after": 49, "same": True}


@pytest.mark.parametrize("layout", ["0False", "1True", "8True"])
def test_rows_go_down_to_holes_with_the_same_bytes(checks: dict[str, Any], layout: str) -> None:
    found = checks["descent"][layout]
    assert found["tops"] == [499, 139]  # of 140 rows
    assert found["same"]
    # Where halves are summed, in another order of cells.
    assert found["difference"] <= (1e-5 if layout == "0False" else 3e-2)


@pytest.mark.parametrize("part", ["PINNED", "GGML_VERSION", "magic", "length"])
def test_trap_14_another_build_is_refused(checks: dict[str, Any], part: str) -> None:
    assert checks["trap_14_another_build"][part]


def test_llama_cpp_is_never_asked_to_shift(checks: dict[str, Any]) -> None:
    assert checks["no_shift_on_the_path"] == {"live": 422, "next": 422}


def test_a_fork_has_the_cells_and_copies_none_to_append(checks: dict[str, Any]) -> None:
    found = checks["fork_appends"]
    assert found["difference"] <= 1e-5
    assert (found["shared"], found["used"]) == (300, 332)


@pytest.mark.parametrize("layout", ["FalseFalse", "FalseTrue", "TrueFalse", "TrueTrue"])
def test_an_event_on_one_side_of_a_fork_changes_no_byte_of_the_other(
    checks: dict[str, Any], layout: str
) -> None:
    found = checks["fork_events"][layout]
    assert found["intact"]
    assert found["in place"]
    assert found["rows"]
    # Of the last 96 rows 16 are its own and 24 stay where they are; 56 others had to be copied.
    assert found["shared"] == 24
    assert found["used"] == 300 + 16 + 56


@pytest.mark.parametrize(
    "change", ["hole at the end", "rewound", "packed", "parked", "a block back"]
)
def test_what_one_side_of_a_fork_does_to_its_rows_the_other_does_not_see(
    checks: dict[str, Any], change: str
) -> None:
    found = checks["fork_changes"][change]
    assert found["intact"]
    assert found["difference"] <= 1e-5
    assert found["used"] == 0


@pytest.mark.parametrize("layout", ["0False", "1False", "0True", "1True"])
def test_rows_before_a_session_s_own_are_as_if_it_had_read_them(
    checks: dict[str, Any], layout: str
) -> None:
    found = checks["front"][layout]
    assert found["kept"]
    assert found["apart"]
    # Where halves are summed, in another order of cells.
    assert found["difference"] <= (1e-5 if layout == "0False" else 3e-2)
    assert found["logical"] == [-400, -399]
    assert found["first"] == 400
    assert found["used"] == 416


def test_a_listener_hears_queries_and_its_error_is_raised(checks: dict[str, Any]) -> None:
    assert checks["listening"] == {"same": True, "said": "not so", "after": 0}


def test_a_fork_without_a_sequence_starts_parked(checks: dict[str, Any]) -> None:
    found = checks["fork_without_a_sequence"]
    assert found["outside"] == [-1, 300, 0, 300]
    assert found["same"]
    assert (found["used"], found["left"], found["whole"]) == (900, 0, 1024)


def test_a_full_cache_is_an_error_and_nothing_is_lost(checks: dict[str, Any]) -> None:
    found = checks["full_cache"]
    assert "full" in found["decode"]
    assert "no room" in found["load"]
    assert found["intact"]


def test_an_aborted_decode_leaves_the_cache_as_it_was(checks: dict[str, Any]) -> None:
    assert checks["aborted_decode"] == {"ended": True, "same": True, "difference": 0}


def test_a_chunk_ends_when_everybody_in_it_has_hung_up(checks: dict[str, Any]) -> None:
    found = checks["hanging_up_ends_a_chunk"]
    assert found["held"]
    assert found["shared"]
    assert found["spared"]
    assert found["ended"]
    assert set(found["told"]) == {'{"done": true}\n'}
    assert (found["same"], found["tokens"]) == (True, 8)


def test_a_prompt_that_was_cut_off_goes_on_as_a_prompt(checks: dict[str, Any]) -> None:
    found = checks["a_prompt_that_was_cut_off_is_counted_once"]
    assert (found["held"], found["ended"], found["same"]) == (True, True, True)
    assert found["first"] == 512
    cut, other = found["read"]
    assert cut == other
    assert other[0] == 1200


def test_of_prompts_longer_than_a_chunk_one_is_read_at_a_time(checks: dict[str, Any]) -> None:
    fed = checks["long_prompts_are_read_one_after_another"]
    assert fed["first"][:4] == [512, 512, 176, 1]
    assert fed["second"][:6] == [0, 0, 512, 512, 176, 1]
    assert fed["short"][:3] == [100, 1, 1]


def test_a_prompt_with_less_left_is_read_beside_the_oldest(checks: dict[str, Any]) -> None:
    """So that what a tool returned need not wait for another session's first prompt."""
    fed = checks["a_prompt_with_less_left_overtakes"]
    assert fed["first"][:4] == [512, 512, 176, 1]
    assert fed["shorter"][:3] == [512, 288, 1]
    assert fed["short"][:2] == [60, 1]
    assert fed["longer"][:6] == [0, 0, 512, 512, 512, 64]
