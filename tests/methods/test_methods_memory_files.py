"""Past sessions in files: what was written comes back, and nothing else does."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from agentbench_kv.methods.memory.files import PastFiles, PastRows, _digest

LAYERS, HEADS, WIDTH = 3, 2, 8
TOKENS = [*range(100, 140)]
ABOUT = {"model": "a" * 64, "dtype": "float16", "kvbench": "1"}


def made(folder: Path, **about: str) -> PastFiles:
    return PastFiles(folder, ABOUT | about, (LAYERS, HEADS, WIDTH), torch.float16)


def rows(count: int = len(TOKENS), seed: int = 0) -> PastRows:
    source = torch.Generator().manual_seed(seed)
    shape = (LAYERS, HEADS, count, WIDTH)
    keys, values = (torch.randn(shape, generator=source) for _ in range(2))
    return PastRows(keys, values.half(), 1.25)


def same(one: PastRows | None, other: PastRows) -> bool:
    return (
        one is not None
        and torch.equal(one.keys, other.keys)
        and torch.equal(one.values, other.values)
        and one.seconds == other.seconds
    )


def test_rows_come_back_mapped_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    files = made(tmp_path)
    assert files.find(TOKENS) is None
    files.keep(TOKENS, rows())
    assert same(made(tmp_path).find(TOKENS), rows())
    assert [*tmp_path.iterdir()] == [files.path(TOKENS)]
    maps = Path("/proc/self/maps")
    if maps.exists():
        held = files.find(TOKENS)
        assert held is not None
        assert str(files.path(TOKENS)) in maps.read_text()


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=9))
def test_another_session_is_another_file(tokens: list[int]) -> None:
    files = made(Path())
    assert files.path(tokens) == files.path([*tokens])
    for other in ([*tokens, 0], tokens[:-1], [tokens[0] + 1, *tokens[1:]], [0, *tokens]):
        assert files.path(other) != files.path(tokens)


@pytest.mark.parametrize("name", [*ABOUT, "rope"])
def test_another_model_or_version_does_not_find_it(tmp_path: Path, name: str) -> None:
    made(tmp_path).keep(TOKENS, rows())
    assert made(tmp_path, **{name: "other"}).find(TOKENS) is None


@pytest.mark.parametrize("part", ["name", "tokens"])
def test_a_file_under_anothers_name_is_refused(tmp_path: Path, part: str, caplog: Any) -> None:
    files = made(tmp_path)
    if part == "name":
        other, tokens = made(tmp_path, model="b" * 64), TOKENS
    else:
        other, tokens = files, [*reversed(TOKENS)]  # as many rows
    other.keep(tokens, rows(seed=1))
    other.path(tokens).rename(files.path(TOKENS))
    assert files.find(TOKENS) is None
    (record,) = caplog.records
    assert "another model, session or version" in record.getMessage()


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        parts = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return parts, dict(file.metadata())


def flipped(parts: dict[str, Any], name: str) -> dict[str, Any]:
    changed = parts[name].clone()
    changed.view(torch.uint8).view(-1)[-1] ^= 1
    return {**parts, name: changed}


FORGERIES: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "a bit of a key": lambda p, a: (flipped(p, "keys"), a),
    "a bit of a value": lambda p, a: (flipped(p, "values"), a),
    "keys and values swapped": lambda p, a: ({"keys": p["values"], "values": p["keys"]}, a),
    "fewer rows": lambda p, a: ({n: t[:, :, 1:].contiguous() for n, t in p.items()}, a),
    "a layer less": lambda p, a: ({n: t[1:].contiguous() for n, t in p.items()}, a),
    "another precision": lambda p, a: ({**p, "values": p["values"].bfloat16()}, a),
    "no values": lambda p, a: ({"keys": p["keys"]}, a),
    "no cost": lambda p, a: (p, {k: v for k, v in a.items() if k != "seconds"}),
    "a lower cost": lambda p, a: (p, a | {"seconds": "0.0"}),
    "another kind": lambda p, a: (p, a | {"format": "kvbench past session 9"}),
    "another key": lambda p, a: (p, a | {"about": a["about"].replace("float16", "float32")}),
    "no metadata": lambda p, _: (p, None),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_every_part_is_checked(tmp_path: Path, forgery: str, caplog: Any) -> None:
    files = made(tmp_path)
    files.keep(TOKENS, rows())
    parts, about = FORGERIES[forgery](*read(files.path(TOKENS)))
    save_file(parts, files.path(TOKENS), about)
    assert files.find(TOKENS) is None
    (record,) = caplog.records
    assert "is no file of this past session" in record.getMessage()
    assert "\n" not in record.getMessage()
    files.keep(TOKENS, rows())  # made anew
    assert same(files.find(TOKENS), rows())


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1.0", "soon"])
def test_a_cost_that_is_none_is_refused(tmp_path: Path, seconds: str) -> None:
    """Also where whoever wrote it knows how the content is summed up."""
    files = made(tmp_path)
    files.keep(TOKENS, rows())
    parts, about = read(files.path(TOKENS))
    about |= {
        "seconds": seconds,
        "sha256": _digest(about["about"], seconds, parts["keys"], parts["values"]),
    }
    save_file(parts, files.path(TOKENS), about)
    assert files.find(TOKENS) is None


def test_any_damage_makes_it_anew(
    tmp_path: Path, damaged: Callable[[Random, bytes], bytes]
) -> None:
    files, source = made(tmp_path), Random(0)
    files.keep(TOKENS, rows())
    path = files.path(TOKENS)
    whole = path.read_bytes()
    for _ in range(300):
        content = damaged(source, whole)
        path.write_bytes(content)
        found = files.find(TOKENS)
        assert found is None or same(found, rows())
    for cut in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert files.find(TOKENS) is None
    path.write_bytes(struct.pack("<Q", 1 << 40) + whole[8:])
    assert files.find(TOKENS) is None
    path.unlink()
    path.mkdir()
    assert files.find(TOKENS) is None


def test_a_disk_that_is_full_costs_nothing_but_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    files = made(tmp_path)
    files.keep(TOKENS, rows())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for tokens in (TOKENS, TOKENS[:7], TOKENS[:8]):
        files.keep(tokens, replace(rows(len(tokens)), seconds=9.0))
    (record,) = caplog.records
    assert "No space left" in record.getMessage()
    assert [*tmp_path.iterdir()] == [files.path(TOKENS)], "half a file was left"
    assert same(files.find(TOKENS), rows())


def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = made(tmp_path)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.keep(TOKENS, rows())
    assert [*tmp_path.iterdir()] == []


def test_the_file_says_what_it_is_of(tmp_path: Path) -> None:
    files = made(tmp_path)
    files.keep(TOKENS, rows())
    about = json.loads(read(files.path(TOKENS))[1]["about"])
    assert about.items() >= ABOUT.items()
    assert about["tokens"] == len(TOKENS)


def test_writers_and_readers_at_once_see_all_or_nothing(tmp_path: Path) -> None:
    """As runs do that share the folder: none of them reads what another has half written."""
    kept, broken = rows(), list[str]()

    def play() -> None:
        files = made(tmp_path)
        for _ in range(25):
            files.keep(TOKENS, kept)
            if not same(files.find(TOKENS), kept):
                broken.append("a file that was being written was read")

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not broken
    assert [*tmp_path.iterdir()] == [made(tmp_path).path(TOKENS)]
