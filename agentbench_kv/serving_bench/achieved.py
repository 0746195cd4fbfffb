"""What a run reached, from its own counts, for the roofline: an accuracy run's or a load test's."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunStore
from agentbench_kv.serving_bench.measurements import (
    LoadMeasurement,
    ServingFolder,
    read_per_token,
    served_model,
    serving_folders,
)
from agentbench_kv.serving_bench.roofline import (
    BYTES,
    Decoder,
    Limit,
    StepWork,
    decode_step,
    session_bytes,
)
from agentbench_kv.serving_bench.summary import disturbances

# Engines' names of precisions by how they begin, and what of `BYTES` they take.
_WIDTHS = {"fp8": "float8", "int8": "int8", "q8": "int8", "int4": "int4", "q4": "int4"}
_MEAN = "mean_concurrent_decodes"
_ASSUMED = "sessions in a step: the mean of requests that decode at once"
_OF_TRIALS = (
    "sessions in a step: trials that decoded, over the whole time, in which prompts were read and "
    "tools ran, too; there were more while any did, so that its share of the limit is too low"
)
_AT_LEAST = (
    "sessions in a step: those that decoded, over the whole time of an older measurement; there "
    "were more while any did, so that its share of the limit is too low"
)


@dataclass(frozen=True)
class Achieved:
    """Decoding as a run counted and timed it."""

    name: str
    sessions: float  # in a step
    rows: float  # live per (layer, KV head), mean over decode steps
    seen: float  # tokens ever seen, mean
    step_s: float  # between two tokens of a session
    dtype: str | None  # of the weights; None: the run does not say
    read: float | None  # bytes of K and V a decoded token has read, where the engine counted them
    model: str
    hardware: Mapping[str, Any]  # what the record says of its machine
    assumed: str = ""  # what of this the run does not say
    kv_dtype: str | None = None  # of the cache, where it is not that of the weights
    left_out: int = 0  # disturbed measurements of the folder

    def kinds(self, dtype: str | None = None, kv_dtype: str | None = None) -> dict[str, str]:
        """Return the dtypes of weights and cache: those asked for, else its own.

        A UsageError that asks for what is not known.
        """
        found = {"dtype": dtype or self.dtype}
        found["kv_dtype"] = kv_dtype or self.kv_dtype or found["dtype"]
        known = {}
        for name, kind in found.items():
            if kind not in BYTES:
                option = f"--{name.replace('_', '-')}"
                said = f"it says {kind!r}" if kind else "nothing says it"
                raise UsageError(f"{self.name}: {option} is needed: {said}")
            known[name] = str(kind)
        return known

    def work(self, decoder: Decoder, **kinds: str) -> StepWork:
        """Return what a decode step of it has to move and to compute."""
        return decode_step(decoder, self.sessions, self.rows, self.seen, read=self.read, **kinds)

    def held(self, decoder: Decoder, kv_dtype: str) -> float:
        """Return bytes of K and V that a session's token attended to: counted, or by its rows."""
        if self.read is not None:
            return self.read
        return session_bytes(decoder, self.rows, self.seen, kv_dtype)

    def other_kinds(self, kinds: Mapping[str, str]) -> list[str]:
        """Name the options that ask for another dtype than the run's, where that counts."""
        known = {"dtype": self.dtype}
        if self.read is None:  # else the engine has counted its bytes
            known["kv_dtype"] = self.kv_dtype or self.dtype
        return [
            f"{self.name} ran in {own}; --{name.replace('_', '-')} {kinds[name]} was asked for"
            for name, own in known.items()
            if own not in (None, kinds[name])
        ]

    def share(self, limit: Limit) -> float:
        """Return how near it came to a limit: 1 is there."""
        return limit.seconds / self.step_s


def read_achieved(path: str, out: Path) -> list[Achieved]:
    """Return what a run has: one line of an accuracy run, one for each load of a load test."""
    folder = Path(path)
    if below := serving_folders([folder]):
        return [each for found in below for each in _loads(ServingFolder.read(found))]
    return [_run(RunStore(out).find(path))]


def _run(run: RunReader) -> Achieved:
    info = run.info
    records = [r for r in run.trials() if r.kv.decode_tokens and r.timing.tpot_ms]
    if not records:
        raise UsageError(
            f"{run.path} has no trial with decoded tokens and a time per token; play it with an "
            "engine that counts its cache"
        )
    tokens = [record.kv.decode_tokens for record in records]

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values, tokens)

    concurrency = min(int(info.spec.get("concurrency") or 1), len(records))
    decoding_s = sum(_steps(record) * (record.timing.tpot_ms or 0.0) / 1e3 for record in records)
    reached = min(concurrency, max(1.0, decoding_s / info.wall_s)) if info.wall_s else 1.0
    return Achieved(
        name=f"{info.spec.get('method')} {info.spec.get('budget') or ''}".strip(),
        sessions=reached,
        rows=mean([record.kv.mean_decode_kv for record in records]),
        seen=mean([_mean_seen(record) for record in records]),
        step_s=mean([record.timing.tpot_ms or 0.0 for record in records]) / 1e3,
        dtype=info.spec.get("dtype"),
        kv_dtype=_width(str(info.spec.get("kv_dtype") or "")),
        read=_read(records),
        model=str(info.spec.get("model")),
        hardware=info.provenance.get("hardware") or {},
        assumed=_OF_TRIALS * (concurrency > 1),
    )


def _read(records: Sequence[TrialRecord]) -> float | None:
    """Return bytes that a decode step read; the first token of an answer comes from its prefill."""
    steps = sum(map(_steps, records))
    return sum(record.kv.bytes_read for record in records) / steps if steps > 0 else None


def _steps(record: TrialRecord) -> int:
    """Return the tokens of a trial that a decode step made."""
    return record.kv.decode_tokens - record.usage.requests


def _mean_seen(record: TrialRecord) -> float:
    """Return about how long a session was while it decoded: half way through its answers."""
    return record.kv.logical - record.kv.decode_tokens / 2


def _loads(folder: ServingFolder) -> Iterator[Achieved]:
    """Yield medians over repetitions of each arm, shape and load, of one machine and version."""
    cells: dict[tuple[str, str, str, str], list[LoadMeasurement]] = defaultdict(list)
    measured = folder.measurements()
    calm = [each for each in measured if not disturbances([each])]
    for each in calm:
        if each.kv and each.figures.get("median_tpot_ms"):
            cells[each.arm, each.shape, each.load, each.origin].append(each)
    if not cells:
        raise UsageError(
            f"{folder.path} has no measurement that nothing disturbed, with a KV account and a "
            "time per token; see what did with kvbench report, and measure again"
        )
    several = len({origin for *_, origin in cells}) > 1
    precisions = {arm.name: arm.kv_dtype for arm in folder.plan.arms}
    for (arm, shape, load, origin), repeats in cells.items():

        def median(name: str, of: Sequence[LoadMeasurement] = repeats) -> float:
            return statistics.median(float(each.figures.get(name, 0)) for each in of)

        read = [each for each in map(read_per_token, repeats) if each is not None]
        yield Achieved(
            name=f"{arm} {shape} {load}" + f", {origin}" * several,
            sessions=statistics.median(map(_decoding, repeats)),
            rows=statistics.median(_counted(folder, each, "mean_decode_kv") for each in repeats),
            seen=statistics.median(_counted(folder, each, "median_logical") for each in repeats),
            step_s=median("median_tpot_ms") / 1e3,
            dtype=folder.plan.dtype or _same_dtype(repeats),
            kv_dtype=_width(precisions.get(arm, "")),
            read=statistics.median(read) if len(read) == len(repeats) else None,
            model=served_model(folder.plan, repeats),
            hardware=repeats[0].provenance.get("hardware") or {},
            assumed=_ASSUMED if all(_MEAN in each.figures for each in repeats) else _AT_LEAST,
            left_out=len(measured) - len(calm),
        )


def _counted(folder: ServingFolder, measured: LoadMeasurement, name: str) -> float:
    """Return a figure of a KV account; a UsageError with the file's name if there is none."""
    value = (measured.kv or {}).get(name)
    if not isinstance(value, (int, float)):
        path = folder.path / measured.file_name
        raise UsageError(f"{path} has no kv.{name}; remove it and measure it again")
    return float(value)


def _same_dtype(repeats: Sequence[LoadMeasurement]) -> str | None:
    """Return the dtype that the engine said it has; None of a server that says none."""
    said = {each.server.get("dtype") for each in repeats}
    return str(said.pop()) if len(said) == 1 and None not in said else None


def _width(kv_dtype: str) -> str | None:
    """Return the name in `BYTES` of an engine's precision of cached rows, where it has one."""
    known = (width for starts, width in _WIDTHS.items() if kv_dtype.startswith(starts))
    return next(known, kv_dtype) or None


def _decoding(measured: LoadMeasurement) -> float:
    """Return how many requests were between first and last token, while any was.

    Of measurements that did not count them: over the whole time, which is fewer.
    """
    figures = measured.figures
    if _MEAN in figures:
        return float(figures[_MEAN])
    each_s = (figures.get("mean_e2el_ms", 0.0) - figures.get("mean_ttft_ms", 0.0)) / 1e3
    whole_s = figures.get("duration") or 1.0
    most = figures.get("max_concurrent_decodes") or 1
    return float(max(1.0, min(most, figures.get("completed", 0) * each_s / whole_s)))
