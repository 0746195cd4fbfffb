"""The roofline: counts by hand for three architectures, limits, what a run reached, refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.cli import kvbench
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_info import read_info, write_info
from agentbench_kv.results.store import RunStore
from agentbench_kv.serving_bench import hardware
from agentbench_kv.serving_bench.measurements import (
    LoadMeasurement,
    ServingArm,
    ServingFolder,
    ServingPlan,
)
from agentbench_kv.serving_bench.roofline import (
    Decoder,
    StepWork,
    _pairs,
    decode_step,
    prefill,
    read_decoder,
)

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288,
    "vocab_size": 151936, "max_position_embeddings": 40960, "eos_token_id": 1,
}  # fmt: skip
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS_20B = QWEN3_8B | {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
PLAIN = {
    "completed": 1, "failed": 0, "duration": 3.0, "total_output_tokens": 3, "mean_e2el_ms": 4.0,
    "output_throughput": 1.0,
}  # fmt: skip
BF16 = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}


def decoder_of(folder: Path, config: dict[str, Any]) -> Decoder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_decoder(folder)


def test_a_dense_model_with_grouped_heads_by_hand(tmp_path: Path) -> None:
    found = decoder_of(tmp_path / "qwen3-8b", QWEN3_8B)
    # Attention 4096·(2·4096 + 2·1024), feed-forward 3·4096·12288, 36 layers: 6.95 B, as published.
    assert found.common == found.active == 36 * (41_943_040 + 150_994_944) == 6_945_767_424
    assert found.head == 622_329_856
    work = decode_step(found, 8, 4096, 4096, **BF16)
    weights = 2 * (6_945_767_424 + 622_329_856)
    read, written = 8 * 4096 * 147_456, 8 * 147_456  # 36 layers · 2 · 8 heads · 128 · 2 bytes
    assert work.bytes == weights + read + written == 19_969_212_416
    assert work.flops == 8 * (weights + 4 * 4096 * 36 * 4096) == 140_416_909_312
    limit = work.limit(hardware.published()["h100"], "bfloat16")
    assert limit.bound == "memory"
    assert limit.seconds == pytest.approx(19_969_212_416 / 3.35e12)
    assert limit.compute_s == pytest.approx(140_416_909_312 / 989.5e12)


def test_a_cache_of_fewer_bits_moves_fewer_bytes(tmp_path: Path) -> None:
    found = decoder_of(tmp_path / "m", QWEN3_8B)
    whole, *smaller = (
        decode_step(found, 1, 8192, 8192, dtype="bfloat16", kv_dtype=kind)
        for kind in ("bfloat16", "float8", "int4")
    )
    weights = 2 * (found.common + found.head)
    for work, part in zip(smaller, (2, 4), strict=True):
        assert work.bytes - weights == (whole.bytes - weights) / part
        assert work.flops == whole.flops


def test_a_mixture_of_experts_by_hand(tmp_path: Path) -> None:
    found = decoder_of(tmp_path / "qwen3-30b-a3b", QWEN3_30B_A3B)
    attention, router, expert = 18_874_368, 262_144, 4_718_592
    assert found.common == 48 * (attention + router)
    assert found.expert == expert
    assert found.active == 48 * (attention + router + 8 * expert) == 2_730_491_904
    # One token reads its eight experts; endlessly many read all 128: 29.9 B without embeddings.
    assert found.weights(1) == pytest.approx(found.active)
    assert found.weights(1e6) == pytest.approx(29_909_581_824)
    work = decode_step(found, 1, 1000, 1000, **BF16)
    assert work.flops == 2 * (found.active + found.head) + 4 * 4096 * 48 * 1000
    kv = 48 * 2 * 512 * 2
    assert work.bytes == pytest.approx(2 * (found.active + found.head) + 1001 * kv)


def test_windows_and_experts_by_hand(tmp_path: Path) -> None:
    found = decoder_of(tmp_path / "gpt-oss-20b", GPT_OSS_20B)
    assert found.windows == (128, 0) * 12
    assert found.common == 24 * (26_542_080 + 92_160)
    assert found.active == found.common + 24 * 4 * 24_883_200 == 3_028_008_960
    assert found.weights(1e6) == pytest.approx(19_749_519_360)
    # Evicting leaves 4,096 of 20,000 tokens in twelve layers; the others read their last 128.
    work = decode_step(found, 1, 4096, 20_000, **BF16)
    attended = 12 * 4096 + 12 * 128
    assert work.flops == 2 * (found.active + found.head) + 4 * 4096 * attended
    kv = 2 * 2 * 512  # bytes a row and layer
    assert work.bytes == pytest.approx(2 * (found.active + found.head) + attended * kv + 24 * kv)
    # A session shorter than the window has no more rows than tokens.
    assert found.attended(100, 100) == 24 * 100


def test_prefill_by_hand(tmp_path: Path) -> None:
    found = decoder_of(tmp_path / "m", QWEN3_8B)
    work = prefill(found, 1000, **BF16)
    pairs = 36 * 1000 * 1001 // 2
    assert work.flops == 2 * 1000 * found.active + 2 * found.head + 4 * 4096 * pairs
    assert work.bytes == 2 * (found.common + found.head) + 2 * 1000 * 147_456


@given(st.integers(1, 60), st.integers(0, 70))
def test_pairs_are_those_that_a_mask_lets_through(tokens: int, window: int) -> None:
    seen = [(i, j) for i in range(tokens) for j in range(i + 1) if not window or i - j < window]
    assert _pairs(tokens, window) == len(seen)


def test_experts_that_some_tokens_meet_are_the_mean_over_all_choices() -> None:
    decoder = Decoder("m", (0,), 1, 1, 1, 1, expert=1, experts=5, chosen=2, expert_layers=1)
    choices = list(itertools.combinations(range(5), 2))
    for tokens in (1, 2, 3):
        met = [len(set().union(*each)) for each in itertools.product(choices, repeat=tokens)]
        assert decoder.touched(tokens) == pytest.approx(sum(met) / len(met))


def test_shared_experts_and_dense_layers_are_common(tmp_path: Path) -> None:
    config = QWEN3_30B_A3B | {"mlp_only_layers": [0, 1], "num_hidden_layers": 4}
    found = decoder_of(tmp_path / "m", config)
    attention, router, dense = 18_874_368, 262_144, 3 * 2048 * 6144
    assert found.expert_layers == 2
    assert found.common == 4 * attention + 2 * router + 2 * dense


FOREIGN = QWEN3_8B | {"model_type": "foo", "num_hidden_layers": 4, "moe_layer_freq": 1}
ATTENTION = 41_943_040  # of a layer


@pytest.mark.parametrize(
    ("change", "sparse", "shared"),
    [
        ({"moe_num_experts": 64, "moe_k": 6}, 4, 0),
        ({"num_experts": 64, "moe_topk": 6, "num_dense_layers": 3, "num_shared_experts": 2}, 1, 32),
        ({"num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 8}, 4, 8),
        ({"moe_num_experts": 64, "moe_k": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
          "moe_num_shared_experts": 1, "moe_norm_min": 1e-12}, 2, 16),
    ],
)  # fmt: skip
def test_mixtures_under_their_other_names(
    change: dict[str, Any], sparse: int, shared: int, tmp_path: Path
) -> None:
    found = decoder_of(tmp_path / "m", FOREIGN | {"moe_intermediate_size": 16} | change)
    assert (found.experts, found.chosen, found.expert_layers) == (64, 6, sparse)
    assert found.expert == 3 * 4096 * 16
    beside = 4096 * 64 + 3 * 4096 * shared
    dense = 3 * 4096 * 12288
    assert found.common == 4 * ATTENTION + sparse * beside + (4 - sparse) * dense


@pytest.mark.parametrize("family", ["apertus", "arcee"])
def test_families_without_a_gate_have_two_matrices(family: str, tmp_path: Path) -> None:
    found = decoder_of(tmp_path / "m", FOREIGN | {"model_type": family})
    assert found.common == 4 * (ATTENTION + 2 * 4096 * 12288)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": 8}, "m has 8 experts and does not say how many a token chooses"),
        ({"num_experts": [1, 2]}, r"num_experts is \[1, 2\]"),
        ({"num_experts": 8, "moe_k": 2, "zero_expert_num": 4}, r"what zero_expert_num \(4\) says"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"vocab_size": None}, "no vocab_size"),
    ],
)
def test_what_sizes_cannot_be_read_from_is_one_line(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        decoder_of(tmp_path / "m", FOREIGN | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"kv_lora_rank": 512}, "MLA"), ({"layer_types": ["linear_attention"] * 36}, "state")],
)
def test_layers_that_are_not_counted_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        decoder_of(tmp_path / "m", QWEN3_8B | change)


def test_published_figures_are_the_vendors() -> None:
    found = hardware.published()
    assert {name: each.bytes_per_s / 1e9 for name, each in found.items()} == {
        "a100": 2039, "h100": 3350, "h200": 4800,
    }  # fmt: skip
    assert all("NVIDIA" in each.source and not each.measured for each in found.values())
    with pytest.raises(UsageError, match="has no figure of it, only of float32"):
        found["a100"].rate("float8")


def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "GIB", 1 << 20)
    monkeypatch.setitem(hardware._SQUARE, "cpu", 64)
    found = hardware.measure_hardware("float32", "cpu", repeats=1)
    assert found.measured
    assert found.bytes_per_s > 0
    assert found.rate("float32") > 0


def test_speeds_are_bytes_and_operations_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "seconds", lambda work, *_: work() is None or 2.0)
    monkeypatch.setattr(hardware, "GIB", 1 << 20)
    assert hardware.read_speed(1) == (1 << 20) / 2
    assert hardware.copy_speed(1) == (1 << 20)
    assert hardware.product_speed(torch.float32, (2, 3, 5), 1) == 30.0


def run_cli(*words: str) -> Any:
    return CliRunner().invoke(kvbench, ["bench", "roofline", *words])


def test_the_command_predicts_and_says_so(tmp_path: Path) -> None:
    decoder = decoder_of(tmp_path / "qwen3-8b", QWEN3_8B)
    words = ("--hardware", "h100", "--model", str(tmp_path / "qwen3-8b"), "--sessions", "8")
    shown = run_cli(*words, "--live", "4096")
    assert shown.exit_code == 0, shown.output
    assert "predictions from published limits: no model was run" in shown.output
    assert "NVIDIA H100 Tensor Core GPU data sheet" in shown.output
    assert "| decode | 8 | 604.0 | 4,096 | 19.969 | 140.42 | 5.961 |" in shown.output
    document = json.loads(run_cli(*words, "--live", "4096", "--json").output)
    assert document["prediction"] is True
    decode = document["rows"][1]
    assert decode["bytes"] == decode_step(decoder, 8, 4096, 4096, **BF16).bytes
    assert decode["limit_tokens_per_s"] == pytest.approx(8 / decode["memory_s"])
    assert decode["share_of_limit"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--hardware is missing"),
        (("--hardware", "h1000"), "h100"),
        (("--hardware", "nowhere.json"), "cannot be read"),
        (("--hardware", "a100", "--dtype", "float8"), "has no figure of it"),
        (("--hardware", "h100", "--model", "nobody"), "model"),
        (("--hardware", "h100", "--run", "nobody"), "no run"),
    ],
)
def test_what_is_missing_is_said_in_a_line(words: tuple[str, ...], said: str) -> None:
    error = run_cli(*words).exception
    assert isinstance(error, UsageError)
    assert said in str(error)


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "gb_per_s": 100, "tflops": {"float32": 1}, "source": "me"}')
    found = hardware.find_hardware(str(path), "float32")
    assert (found.bytes_per_s, found.rate("float32")) == (1e11, 1e12)
    for text in ('{"name": "x"}', "[]", '{"name": "x", "gb_per_s": 0, "tflops": {}, "source": ""}',
                 *(f'{{"name": "x", "gb_per_s": {speed}, "tflops": {{"float32": 1}}, "source": ""}}'
                   for speed in ("1e308", "NaN", "Infinity"))):  # fmt: skip
        path.write_text(text)
        with pytest.raises(UsageError, match="mine"):
            hardware.find_hardware(str(path), "float32")


def trial(number: int, tokens: int, tpot_ms: float, rows: float, read: int) -> TrialRecord:
    kv = {"decode_tokens": tokens, "mean_decode_kv": rows, "bytes_read": read, "logical": 500}
    return TrialRecord(
        sample_id=f"s{number}", trial=0, seed=0, status="scored", score=1.0, kv=kv,
        timing={"tpot_ms": tpot_ms, "e2e_s": 10.0},
    )  # fmt: skip


def test_a_run_is_held_against_the_limit_of_its_own_counts(tmp_path: Path) -> None:
    decoder = decoder_of(tmp_path / "qwen3-8b", QWEN3_8B)
    spec = {"task": "t", "method": "agentkv", "budget": 64, "engine": "embedded", "seed": 0}
    spec |= {"model": "models/qwen3-8b", "dtype": "bfloat16", "concurrency": 4}
    provenance = {"hardware": {"cpu": "an abacus"}}
    store = RunStore(tmp_path / "runs")
    with store.open("mine", spec, provenance) as run:
        run.append_trial(trial(0, 100, 20.0, 60.0, 100 * 9_000_000))
        run.append_trial(trial(1, 300, 40.0, 80.0, 300 * 11_000_000))
    path = store.root / "mine"
    write_info(path, read_info(path).model_copy(update={"wall_s": 10.0}))  # type: ignore[union-attr]
    words = ("--hardware", "h100", "--model", str(tmp_path / "qwen3-8b"), "--run", str(path))
    (row,) = json.loads(run_cli(*words, "--json").output)["rows"]
    # Of ten seconds, one trial decoded for two and the other for twelve.
    assert (row["sessions"], row["live"]) == (1.4, 75.0)
    assert "its share of the limit is too low" in row["notes"][0]
    expected = decode_step(decoder, 1.4, 75.0, 0, read=10_500_000, **BF16)
    assert row["bytes"] == pytest.approx(expected.bytes)
    assert row["achieved_tokens_per_s"] == pytest.approx(400 / 10)
    assert row["share_of_limit"] == pytest.approx(row["memory_s"] / 0.035)
    shown = run_cli(*words).output
    assert "limits from the run's counts" in shown
    assert "predictions" not in shown
    assert "ran on an abacus" in shown


def test_a_run_without_times_is_refused(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    with store.open("mine", {"method": "full", "model": "micro"}) as run:
        run.append_trial(TrialRecord(sample_id="s", trial=0, seed=0, status="timeout"))
    error = run_cli("--hardware", "h100", "--run", str(store.root / "mine")).exception
    assert isinstance(error, UsageError)
    assert "no trial with decoded tokens and a time per token" in str(error)


def test_a_load_test_has_a_row_for_each_load(tmp_path: Path) -> None:
    plan = ServingPlan(
        engine="vllm", model="micro", dtype="float32", arms=[ServingArm(name="full")],
        shapes=["1k/64"], loads=["c2", "c4"], turns=1, tool_tokens=1, think_time_s=0.0,
        sessions=None, warmup=0, repeats=2, seed=0,
    )  # fmt: skip
    folder = ServingFolder.create(tmp_path / "load", plan, {})
    for load, repetition in itertools.product(plan.loads, range(2)):
        folder.add(
            LoadMeasurement(
                arm="full", shape="1k/64", load=load, repetition=repetition, place=0, date="",
                backend="", model_id="", num_prompts=1, max_concurrency=2, request_rate="inf",
                kv={"mean_decode_kv": 1000.0, "median_logical": 1064.0},
                figures={
                    "median_tpot_ms": 10.0 + 2 * repetition,
                    "mean_concurrent_decodes": float(load[1]), **PLAIN,
                },
            )
        )  # fmt: skip
    found = run_cli("--hardware", "h100", "--run", str(tmp_path / "load"), "--json")
    rows = json.loads(found.output)["rows"]
    assert [row["sessions"] for row in rows] == [2, 4]
    assert [row["achieved_tokens_per_s"] for row in rows] == pytest.approx([2 / 0.011, 4 / 0.011])


def test_a_share_above_the_whole_is_a_fault_of_the_measurement(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    with store.open("mine", {"method": "full", "model": "micro", "dtype": "float32"}) as run:
        run.append_trial(trial(0, 100, 1e-6, 60.0, 100 * 9_000))
    path = str(store.root / "mine")
    assert "a fault of the measurement" in run_cli("--hardware", "h100", "--run", path).output


def test_requests_that_wait_are_in_no_step_of_an_older_measurement(tmp_path: Path) -> None:
    plan = ServingPlan(
        engine="vllm", model="micro", dtype="float32", arms=[ServingArm(name="full")],
        shapes=["1k/64"], loads=["c8"], turns=1, tool_tokens=1, think_time_s=0.0,
        sessions=None, warmup=0, repeats=1, seed=0,
    )  # fmt: skip
    folder = ServingFolder.create(tmp_path / "load", plan, {})
    figures = {
        **PLAIN, "median_tpot_ms": 10.0, "concurrency": 4.5, "completed": 8, "duration": 8.0,
        "mean_e2el_ms": 4500.0, "mean_ttft_ms": 2500.0, "max_concurrent_decodes": 4,
    }  # fmt: skip
    folder.add(
        LoadMeasurement(
            arm="full", shape="1k/64", load="c8", repetition=0, place=0, date="", backend="",
            model_id="", num_prompts=8, max_concurrency=8, request_rate="inf", figures=figures,
            kv={"mean_decode_kv": 1000.0, "median_logical": 1064.0},
        )
    )  # fmt: skip
    found = run_cli("--hardware", "h100", "--run", str(tmp_path / "load"), "--json")
    (row,) = json.loads(found.output)["rows"]
    assert row["sessions"] == 2.0
    assert "older measurement" in row["notes"][0]


def loads_folder(path: Path, accounts: list[dict[str, Any]], **changes: Any) -> Path:
    """Write a folder of a measurement for each KV account; figures of it may stand there, too."""
    fields: dict[str, Any] = {
        "engine": "vllm", "model": "micro", "dtype": "float32", "arms": [ServingArm(name="full")],
        "shapes": ["1k/64"], "loads": ["c2"], "turns": 1, "tool_tokens": 1, "think_time_s": 0.0,
        "sessions": None, "warmup": 0, "repeats": len(accounts), "seed": 0,
    }  # fmt: skip
    folder = ServingFolder.create(path, ServingPlan(**fields | changes), {})
    for number, account in enumerate(accounts):
        figures = PLAIN | {"median_tpot_ms": 10.0, "mean_concurrent_decodes": 2.0}
        figures |= {name: value for name, value in account.items() if name in figures}
        folder.add(
            LoadMeasurement(
                arm="full", shape="1k/64", load="c2", repetition=number, place=0, date="",
                backend="", model_id="", num_prompts=1 + figures["failed"], max_concurrency=2,
                request_rate="inf", kv=account, figures=figures,
            )
        )  # fmt: skip
    return path


ACCOUNT = {"mean_decode_kv": 1000.0, "median_logical": 1064.0}


def rows_of(*words: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(run_cli("--hardware", "h100", *words, "--json").output)[
        "rows"
    ]
    return rows


def test_each_run_is_counted_in_its_own_dtypes(tmp_path: Path) -> None:
    arm = ServingArm(name="full", kv_dtype="fp8_e4m3")
    plain = loads_folder(tmp_path / "a", [ACCOUNT])
    half = loads_folder(tmp_path / "b", [ACCOUNT], dtype="bfloat16", arms=[arm])
    rows = rows_of("--run", str(plain), "--run", str(half))
    decoder = read_decoder(model_path("micro"))
    kinds = [("float32", "float32"), ("bfloat16", "float8")]
    assert [(row["dtype"], row["kv_dtype"]) for row in rows] == kinds
    assert [row["bytes"] for row in rows] == [
        decode_step(decoder, 2, 1000.0, 1064.0, dtype=weights, kv_dtype=cache).bytes
        for weights, cache in kinds
    ]
    (asked,) = rows_of("--run", str(plain), "--dtype", "bfloat16")
    assert "ran in float32; --dtype bfloat16 was asked for" in str(asked["notes"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": None}, "--dtype is needed: nothing says it"),
        ({"arms": [ServingArm(name="full", kv_dtype="kivi2")]}, "--kv-dtype is needed: it says"),
    ],
)
def test_a_dtype_that_nothing_says_is_asked_for(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = loads_folder(tmp_path / "a", [ACCOUNT], **changes)
    error = run_cli("--hardware", "h100", "--run", str(path)).exception
    assert isinstance(error, UsageError)
    assert said in str(error)
    assert rows_of("--run", str(path), "--dtype", "float32", "--kv-dtype", "int4")


def test_folders_below_the_one_that_is_named_are_read(tmp_path: Path) -> None:
    for name in "ab":
        loads_folder(tmp_path / "out" / name, [ACCOUNT])
    assert len(rows_of("--run", str(tmp_path / "out"))) == 2


def test_repetitions_with_failed_requests_are_left_out(tmp_path: Path) -> None:
    broken = ACCOUNT | {"failed": 3, "median_tpot_ms": 999.0}
    path = loads_folder(tmp_path / "a", [ACCOUNT, broken])
    (row,) = rows_of("--run", str(path))
    assert row["achieved_tokens_per_s"] == pytest.approx(200)
    assert "left out: 1 measurements that something disturbed" in row["notes"]
    path = loads_folder(tmp_path / "b", [broken])
    error = run_cli("--hardware", "h100", "--run", str(path)).exception
    assert isinstance(error, UsageError)
    assert "no measurement that nothing disturbed" in str(error)


def test_measurements_of_two_machines_have_a_row_each(tmp_path: Path) -> None:
    """The first one's limit was set against medians that were the second one's."""
    path = loads_folder(tmp_path / "a", [ACCOUNT, ACCOUNT | {"median_tpot_ms": 5.0}])
    (file,) = path.glob("rep02*")
    other = {"provenance": {"hardware": {"cpu": "another"}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | other))
    rows = rows_of("--run", str(path))
    assert sorted(row["achieved_tokens_per_s"] for row in rows) == pytest.approx([200, 400])
    assert ["another" in row["what"] for row in rows] == [
        "another" in str(r["notes"]) for r in rows
    ]


def test_a_cache_of_another_dtype_than_the_runs_is_told(tmp_path: Path) -> None:
    path = loads_folder(tmp_path / "a", [ACCOUNT])
    (row,) = rows_of("--run", str(path), "--kv-dtype", "int8")
    assert any("ran in float32; --kv-dtype int8 was asked for" in note for note in row["notes"])
    counted = loads_folder(tmp_path / "b", [ACCOUNT | {"bytes_read": 10**6, "decode_tokens": 9}])
    (row,) = rows_of("--run", str(counted), "--kv-dtype", "int8")
    assert not any("asked for" in note for note in row["notes"])


def test_limits_of_other_threads_than_the_runs_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = hardware.Hardware("m", 1e9, {"float32": 1e9}, "s", measured=True, threads=1)
    monkeypatch.setattr(hardware, "measure_hardware", lambda *_: machine)
    path = loads_folder(tmp_path / "a", [ACCOUNT])
    for threads in (1, 16):
        plan = json.loads((path / "serving.json").read_text())
        plan["provenance"] = {"hardware": {"torch_threads": threads}}
        (path / "serving.json").write_text(json.dumps(plan))
        output = run_cli("--hardware", "measured", "--run", str(path)).output
        assert ("OMP_NUM_THREADS=16" in output) is (threads == 16)


def test_an_account_without_a_count_is_named(tmp_path: Path) -> None:
    path = loads_folder(tmp_path / "a", [{"median_logical": 5.0}])
    error = run_cli("--hardware", "h100", "--run", str(path)).exception
    assert isinstance(error, UsageError)
    assert "rep01-full-1k-64-c2.json has no kv.mean_decode_kv" in str(error)


def test_work_that_computes_more_than_it_moves_is_bound_by_it() -> None:
    machine = hardware.Hardware("m", 1.0, {"float32": 10.0}, "s")
    assert StepWork(1.0, 100.0).limit(machine, "float32").bound == "compute"
    assert StepWork(1.0, 100.0).limit(machine, "float32").seconds == 10.0


def test_a_load_test_that_counted_its_bytes_is_held_against_them(tmp_path: Path) -> None:
    plan = ServingPlan(
        engine="vllm", model="micro", dtype="float32", arms=[ServingArm(name="full")],
        shapes=["1k/64"], loads=["c2"], turns=1, tool_tokens=1, think_time_s=0.0,
        sessions=None, warmup=0, repeats=1, seed=0,
    )  # fmt: skip
    folder = ServingFolder.create(tmp_path / "load", plan, {})
    account = {"mean_decode_kv": 1000.0, "median_logical": 1064.0}
    counted = account | {"bytes_read": 6_000_000, "decode_tokens": 4}
    shares = []
    for kv in (account, counted):
        folder.add(
            LoadMeasurement(
                arm="full", shape="1k/64", load="c2", repetition=0, place=0, date="", backend="",
                model_id="", num_prompts=1, max_concurrency=2, request_rate="inf", kv=kv,
                figures={"median_tpot_ms": 10.0, "mean_concurrent_decodes": 2.0} | PLAIN,
            )
        )  # fmt: skip
        found = run_cli("--hardware", "h100", "--run", str(tmp_path / "load"), "--json")
        shares.append(json.loads(found.output)["rows"][0]["bytes"])
    decoder = read_decoder(model_path("micro"))
    kinds = {"dtype": "float32", "kv_dtype": "float32"}
    assert shares == [
        decode_step(decoder, 2, 1000.0, 1064.0, **kinds).bytes,
        decode_step(decoder, 2, 1000.0, 1064.0, read=2_000_000, **kinds).bytes,
    ]
