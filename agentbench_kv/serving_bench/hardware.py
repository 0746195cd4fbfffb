"""What machines can do at the most: as their vendors say, in a file, or measured on this one."""

from __future__ import annotations

import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from agentbench_kv.errors import UsageError, unknown_name

DTYPES = ("float32", "float16", "bfloat16", "float8")
MEASURED = "measured"
GIB = 1 << 30
_SQUARE = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class Hardware:
    """One machine's limits; `products` are operations a second by dtype."""

    name: str
    bytes_per_s: float
    products: Mapping[str, float]
    source: str
    measured: bool = False
    threads: int = 0  # of a processor that was measured here

    def rate(self, dtype: str) -> float:
        """Return operations a second; UsageError for a dtype it has no figure of."""
        if dtype not in self.products:
            known = ", ".join(self.products)
            raise UsageError(f"--dtype {dtype}: {self.name} has no figure of it, only of {known}")
        return self.products[dtype]

    def said(self, dtype: str) -> str:
        rate = self.rate(dtype)
        speed = f"{rate / 1e12:,.1f} T" if rate >= 1e11 else f"{rate / 1e9:,.1f} G"
        return f"{self.bytes_per_s / 1e9:,.1f} GB/s, {speed}FLOP/s in {dtype} ({self.source})"


def find_hardware(name: str, dtype: str, device: str = "auto") -> Hardware:
    """Return published figures by name, those of a JSON file, or this machine's (`measured`)."""
    if name == MEASURED:
        return measure_hardware(dtype, device)
    known = published()
    if name in known:
        return known[name]
    if name.endswith(".json"):
        return read_hardware(Path(name))
    raise unknown_name("hardware", name, [*known, MEASURED, "FILE.json"])


def published() -> dict[str, Hardware]:
    """Return the machines of `hardware.csv`, whose figures are their vendors'."""
    text = (files("agentbench_kv.serving_bench") / "hardware.csv").read_text("utf-8")
    found = {}
    for row in csv.DictReader(text.splitlines()):
        products = {dtype: float(row[dtype]) * 1e12 for dtype in DTYPES if row[dtype]}
        speed = float(row["gb_per_s"]) * 1e9
        found[row["name"]] = Hardware(row["title"], speed, products, row["source"])
    return found


def read_hardware(path: Path) -> Hardware:
    """Read `{"name", "gb_per_s", "tflops": {dtype: figure}, "source"}`; UsageError if it is not."""
    try:
        document = json.loads(path.read_text("utf-8"))
        products = {str(k): float(v) * 1e12 for k, v in document["tflops"].items()}
        speed = float(document["gb_per_s"]) * 1e9
        found = Hardware(str(document["name"]), speed, products, str(document["source"]))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"--hardware {path} cannot be read: {error}") from None
    except KeyError as error:
        raise UsageError(
            f"--hardware {path} has no {error}; expected name, gb_per_s, tflops and source"
        ) from None
    sound = all(0 < each < math.inf for each in (speed, *products.values()))
    if not products or not sound or set(products) - set(DTYPES):
        raise UsageError(
            f"--hardware {path}: expected finite figures above 0, tflops of {', '.join(DTYPES)}"
        )
    return found


def seconds(work: Callable[[], object], repeats: int, device: str = "cpu") -> float:
    """Return the median time of some work, after one unmeasured time."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def read_speed(repeats: int, device: str = "cpu") -> float:
    """Return bytes a second of reading one gigabyte, by summing it."""
    source = torch.ones(GIB // 4, device=device)
    return GIB / seconds(source.sum, repeats, device)


def copy_speed(repeats: int, device: str = "cpu") -> float:
    """Return bytes a second of a copy, read and written ones."""
    source = torch.ones(GIB // 4, device=device)
    target = torch.empty_like(source)
    return 2 * GIB / seconds(lambda: target.copy_(source), repeats, device)


def product_speed(
    dtype: torch.dtype, shape: tuple[int, int, int], repeats: int, device: str = "cpu"
) -> float:
    """Return operations a second of a product of matrices [rows, inner] and [outer, inner]."""
    rows, inner, outer = shape
    inputs = torch.randn(rows, inner, device=device).to(dtype)
    weights = torch.randn(outer, inner, device=device).to(dtype)
    with torch.inference_mode():
        spent = seconds(lambda: torch.nn.functional.linear(inputs, weights), repeats, device)
    return 2 * rows * inner * outer / spent


def measure_hardware(dtype: str, device: str = "auto", repeats: int = 5) -> Hardware:
    """Measure this machine: the faster of reading and copying, and a large product."""
    if dtype == "float8":
        raise UsageError("--dtype float8 is not measured here; give --dtype bfloat16")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.device(device).type
    size = _SQUARE.get(kind, _SQUARE["cpu"])
    speed = max(read_speed(repeats, kind), copy_speed(repeats, kind))
    product = product_speed(getattr(torch, dtype), (size, size, size), repeats, kind)
    name = torch.cuda.get_device_name() if kind == "cuda" else f"this machine's {kind}"
    threads = 0 if kind == "cuda" else torch.get_num_threads()
    with_threads = f", {threads} threads" * bool(threads)
    source = f"measured here: sum and copy of 1 GiB, a product of {size:,}²{with_threads}"
    return Hardware(name, speed, {dtype: product}, source, measured=True, threads=threads)


def document(hardware: Hardware) -> dict[str, Any]:
    return {
        "name": hardware.name,
        "gb_per_s": hardware.bytes_per_s / 1e9,
        "tflops": {dtype: rate / 1e12 for dtype, rate in hardware.products.items()},
        "source": hardware.source,
        "measured": hardware.measured,
    }
