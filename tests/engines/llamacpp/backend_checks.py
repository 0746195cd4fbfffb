"""Checks of the backend, run with the interpreter of its environment; prints JSON.

`python backend_checks.py FOLDER` runs every function called `check_*`, or those whose names follow,
and prints one object of their results, for `test_llamacpp_backend.py` to judge. `... FOLDER abort`
is trap 1.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.core.gguf_header import ROPE_FACTORS
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.llamacpp.gguf import TINY, _weights, make_model, write_file, write_shape
from agentbench_kv.engines.llamacpp.server import blob as blobs
from agentbench_kv.engines.llamacpp.server import library
from agentbench_kv.engines.llamacpp.server.blob import Blob, RowFormat
from agentbench_kv.engines.llamacpp.server.cells import Cells
from agentbench_kv.engines.llamacpp.server.context import Context, DecodeAbortedError, DecodeBatch
from agentbench_kv.engines.llamacpp.server.rows import SequenceRows
from agentbench_kv.engines.llamacpp.server.scheduler import STEP_TOKENS, BatchScheduler
from agentbench_kv.engines.llamacpp.server.session import Stream
from agentbench_kv.engines.llamacpp.server.watch import NativeWatch, PythonWatch, Watch
from agentbench_kv.errors import CapacityError, KVBenchError, PrerequisiteError
from agentbench_kv.methods.full import Full
from agentbench_kv.phases import TokenPhases

F32, F16, Q8 = 0, 1, 8
LAYERS, HEADS = TINY.num_hidden_layers, TINY.num_attention_heads
KV_HEADS = TINY.num_key_value_heads
DRAW = torch.Generator().manual_seed(5)
TEXT = torch.randint(0, TINY.vocab_size, (400,), generator=DRAW).tolist()
NEXT = torch.randint(0, TINY.vocab_size, (16,), generator=DRAW).tolist()
START, END = 100, 200
LONG = 120.0  # seconds; nothing that works waits that long
MODEL = Path()


class Scene:
    """A context with one session of 400 tokens."""

    def __init__(
        self,
        row_type: int = F32,
        flash: bool = False,
        watch: Watch | None = None,
        tokens: int = 400,
        cells: int = 2048,
        model: Path | None = None,
    ) -> None:
        self.context = Context(
            model or MODEL, cells=cells, sequences=4, row_type=row_type, flash=flash, queries=True,
            watch=watch,
        )  # fmt: skip
        self.cells = Cells(self.context)
        self.rows = self.session(0)
        self.feed(TEXT[:tokens])

    def session(self, sequence: int) -> SequenceRows:
        rows = SequenceRows(self.cells)
        rows.sequence = sequence
        return rows

    def feed(self, tokens: list[int], rows: SequenceRows | None = None) -> torch.Tensor:
        rows = rows or self.rows
        first, count = rows.next, len(tokens)
        batch = DecodeBatch(tokens, list(range(first, first + count)), [rows.sequence] * count,
                      list(range(count)))  # fmt: skip
        logits = self.context.decode(batch)
        rows.append(self.context.watch.cells(), first)
        return logits

    def block(self) -> torch.Tensor:
        return (self.rows.rope >= START) & (self.rows.rope < END)

    def evict(self) -> tuple[Blob, torch.Tensor]:
        block = self.block()
        logical = self.rows.logical[block]
        blob = self.rows.save(block)
        self.rows.drop(block)
        return blob, logical

    def close(self) -> None:
        self.context.close()


def largest(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.float() - right.float()).abs().max())


def rotated(keys: torch.Tensor, by: int) -> torch.Tensor:
    """Rotate keys [tokens, heads, head_dim] in numpy and float64, halves paired."""
    half = keys.shape[-1] // 2
    angles = by * TINY.rope_theta ** (-2.0 * np.arange(half) / keys.shape[-1])
    first, second = np.split(keys.double().numpy(), 2, -1)
    cosine, sine = np.cos(angles), np.sin(angles)
    turned = [first * cosine - second * sine, first * sine + second * cosine]
    return torch.from_numpy(np.concatenate(turned, -1))


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """Attend in numpy: queries [heads, n, d] see all rows [kv_heads, rows, d] up to their own."""
    q, k, v = (part.double().numpy() for part in (queries, keys, values))
    group, n, rows = len(q) // len(k), q.shape[1], k.shape[1]
    hidden = np.arange(rows)[None] > last - n + 1 + np.arange(n)[:, None]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = np.where(hidden, -np.inf, q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]))
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return shares, shares @ v


def check_restore_same_position() -> Any:
    found = {}
    for flash, row_type in ((False, F32), (False, F16), (True, F32), (True, F16), (True, Q8)):
        plain = Scene(row_type, flash)
        wanted = plain.feed(NEXT)
        plain.close()
        lost = Scene(row_type, flash)
        lost.evict()
        missing = largest(lost.feed(NEXT), wanted)
        lost.close()
        scene = Scene(row_type, flash)
        before = scene.rows.cells.clone()
        blob, logical = scene.evict()
        scene.rows.restore(blob, logical)
        found[f"{row_type}{flash}"] = {
            "same cells": bool(torch.equal(before, scene.rows.cells)),
            "difference": largest(scene.feed(NEXT), wanted),
            "lost": missing,
        }
        scene.close()
    return found


def check_restore_other_cells() -> Any:
    scene = Scene()
    wanted = scene.feed(NEXT)
    scene.rows.next = 400
    scene.rows.drop(scene.rows.rope >= 400)
    before = scene.rows.cells.clone()
    blob, logical = scene.evict()
    other = scene.session(1)
    scene.feed(TEXT[:150], other)
    scene.rows.restore(blob, logical)
    moved = not torch.equal(before, scene.rows.cells)
    difference = largest(scene.feed(NEXT), wanted)
    scene.close()
    return {"moved": moved, "difference": difference}


def check_rotated_keys() -> Any:
    scene = Scene()
    blob, _ = scene.evict()
    saved = [blob.keys(layer).clone() for layer in range(LAYERS)]
    blob.rotate(300)
    numpy = max(largest(blob.keys(i), rotated(keys, 300)) for i, keys in enumerate(saved))
    moved = blob.positions.tolist() == list(range(400, 500))
    # The first layer's keys depend on token and position only, not on the context.
    fresh = scene.session(1)
    fresh.next = 400
    scene.feed(TEXT[START:END], fresh)
    own = scene.cells.keys[0][:, fresh.cells].transpose(0, 1)
    scene.close()
    return {"numpy": numpy, "moved": moved, "fresh": largest(blob.keys(0), own)}


def scaled_model() -> tuple[Path, list[float]]:
    """Make a Llama whose frequencies are divided as those of Llama 3.1 are, in a tensor."""
    import gguf

    path, half = MODEL.with_name("scaled.gguf"), TINY.head_dim // 2
    factors = [1.0 if pair < half // 2 else 8.0 - pair / half for pair in range(half)]
    writer = gguf.GGUFWriter(path, "llama")
    write_shape(writer, vars(TINY), "llama")
    writer.add_tokenizer_model("none")
    writer.add_tensor(ROPE_FACTORS, np.asarray(factors, np.float32))
    for name, tensor in _weights(TINY, 0):
        if not name.endswith(("attn_q_norm", "attn_k_norm")):
            writer.add_tensor(f"{name}.weight", tensor)
    write_file(writer)
    return path, factors


def check_scaled_rope() -> Any:
    path, factors = scaled_model()
    scene = Scene(model=path)
    blob, _ = scene.evict()
    before = blob.keys(0).clone()
    blob.rotate(300)
    fresh = scene.session(1)
    fresh.next = 400
    scene.feed(TEXT[START:END], fresh)
    own = scene.cells.keys[0][:, fresh.cells].transpose(0, 1)
    found = list(scene.context.shape.rope_factors)
    scene.close()
    return {
        "read": max(abs(a - b) for a, b in zip(found, factors, strict=True)),
        "fresh": largest(blob.keys(0), own),
        "unturned": largest(before, own),
    }


def check_attention_rows() -> Any:
    names = [f"kq_soft_max-{layer}" for layer in range(LAYERS)]
    watch = PythonWatch(LAYERS, True, names)
    scene = Scene(watch=watch, tokens=300)
    scene.feed(NEXT)
    worst, sums, beyond = 0.0, 0.0, 0.0
    for layer in range(LAYERS):
        seen = torch.from_numpy(watch.kept[f"kq_soft_max-{layer}"][0][0])
        sums = max(sums, float((seen.sum(-1) - 1).abs().max()))
        beyond = max(beyond, float(seen[..., 316:].abs().sum()))
        keys = scene.cells.keys[layer][:, scene.rows.cells]
        values = scene.cells.values[layer][:, scene.rows.cells]
        shares, _ = attention(watch.queries(layer, HEADS), keys, values, 315)
        worst = max(worst, float(np.abs(shares - seen[..., scene.rows.cells].numpy()).max()))
    scene.close()
    return {"sums": sums, "beyond": beyond, "numpy": worst}


def check_per_head_sets() -> Any:
    names = [f"kqv-{layer}" for layer in range(LAYERS)]
    watch = PythonWatch(LAYERS, True, names)
    scene = Scene(watch=watch, tokens=300)
    keys, values = scene.cells.read(scene.rows.cells)
    kept = random_sets(300, 96)
    scene.cells.compact(scene.rows.cells, kept)
    scene.rows.keep_last(96)
    scene.feed(NEXT[:8])
    worst = 0.0
    for layer in range(LAYERS):
        new = scene.cells.read(scene.rows.cells[-8:])
        own = [
            torch.cat([chosen(whole[layer], kept[layer]), fresh[layer]], 1)
            for whole, fresh in zip((keys, values), new, strict=True)
        ]
        _, outputs = attention(watch.queries(layer, HEADS), *own, 103)
        seen = watch.kept[f"kqv-{layer}"][0][0]
        worst = max(worst, float(np.abs(outputs - seen).max()))
    scene.close()
    return {"numpy": worst}


def random_sets(rows: int, budget: int) -> torch.Tensor:
    sets = [
        torch.randperm(rows, generator=DRAW)[:budget].sort().values
        for _ in range(LAYERS * KV_HEADS)
    ]
    return torch.stack(sets).reshape(LAYERS, KV_HEADS, budget)


def chosen(rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.stack([rows[head][kept[head]] for head in range(len(rows))])


def check_compaction_bytes() -> Any:
    found = {}
    for flash, sort in ((False, False), (False, True), (True, False), (True, True)):
        scene = Scene(F16, flash, tokens=300)
        keys, values = scene.cells.read(scene.rows.cells)
        kept = random_sets(300, 96)
        positions = torch.arange(300).expand(LAYERS, KV_HEADS, -1).clone()
        scene.cells.compact(scene.rows.cells, kept, [positions], sort=sort)
        scene.rows.keep_last(96)
        front = positions[..., :96]
        after = scene.cells.read(scene.rows.cells)
        gathered = front[..., None].expand(-1, -1, -1, TINY.head_dim)
        found[f"{flash}{sort}"] = {
            "sets": bool(torch.equal(front.sort(-1).values, kept)),
            "in order": bool(torch.equal(front, kept)),
            "rows": all(
                bool(torch.equal(new, old.gather(2, gathered)))
                for new, old in zip(after, (keys, values), strict=True)
            ),
        }
        scene.close()
    return found


def check_one_set_for_all_heads() -> Any:
    gone = torch.zeros(300, dtype=torch.bool)
    gone[torch.randperm(290, generator=DRAW)[:200]] = True
    plain = Scene(tokens=300)
    plain.rows.drop(gone)
    wanted = plain.feed(NEXT)
    plain.close()
    scene = Scene(tokens=300)
    kept = (~gone).nonzero().flatten().expand(LAYERS, KV_HEADS, -1).contiguous()
    scene.cells.compact(scene.rows.cells, kept)
    scene.rows.keep_last(100)
    difference = largest(scene.feed(NEXT), wanted)
    scene.close()
    return {"difference": difference}


def check_watches_agree() -> Any:
    python, native = Scene(watch=PythonWatch(LAYERS, True)), Scene()
    if not isinstance(native.context.watch, NativeWatch):
        return {"native": False}
    same = [torch.equal(python.context.watch.cells(), native.context.watch.cells())]
    for layer in range(LAYERS):
        pair = (each.context.watch.queries(layer, HEADS) for each in (python, native))
        same.append(bool(torch.equal(*pair)))
    python.close()
    native.close()
    return {"native": True, "same": all(same)}


def empty_state(form: RowFormat, tokens: int) -> bytearray:
    """A state whose rows, and the headers that `Blob` does not read, are zero."""
    data = bytearray(blobs._size(form, tokens))
    blobs._HEADER.pack_into(data, 0, blobs.MAGIC, 0, 1, tokens)
    return data


def check_plugin_turns_as_the_kernels() -> Any:
    """Compare keys turned by the plug-in with the same keys turned by `kernels.rope_rotate`."""
    scene = Scene(tokens=1)
    shape = scene.context.shape
    scene.close()
    found = {}
    for row_type, size in ((F32, 4), (F16, 2)):
        for interleaved in (False, True):
            width = shape.kv_heads * shape.head_dim
            form = RowFormat(replace(shape, interleaved=interleaved), row_type, width * size, True)
            ours = Blob(form, empty_state(form, 37))
            ours.set_positions(torch.arange(37))
            ours._all_keys().copy_(torch.randn(ours._all_keys().shape, generator=DRAW))
            theirs, before = Blob(form, bytearray(ours.data)), ours._all_keys().clone()
            ours.rotate(-1234)
            theirs._rotate_by_kernels(-1234)
            found[f"{row_type}{interleaved}"] = {
                "difference": largest(ours._all_keys(), theirs._all_keys()),
                "turned": largest(ours._all_keys(), before),
                "moved": ours.positions.tolist() == list(range(-1234, -1197)),
            }
    return {"native": library.find_plugin() is not None, "forms": found}


def check_plugin_loads_as_python() -> Any:
    """Load a block by the plug-in and by Python: the same cells, the same bytes in all of them."""
    found = []
    for name in ("load", "_load_by_python"):
        scene = Scene()
        blob, _ = scene.evict()
        before = bytes(blob.data)
        cells = getattr(scene.cells, name)(0, blob)
        state = bytes(scene.context.state(0))
        found.append((cells.tolist(), state, bytes(blob.data) == before))
        scene.close()
    return {"same": found[0] == found[1], "intact": found[0][2], "cells": len(found[0][0])}


def check_trap_2_saving_before_a_shift_is_done() -> Any:
    """llama.cpp's own shift turns keys with the next decode only; ours turns them at once."""
    scene = Scene()
    binding, context = library.llama(), scene.context
    context.remove(0, START, END)
    binding.llama_memory_seq_add(context.memory, 0, END, -1, START - END)
    pending = Blob(scene.cells.form, context.state(0)).keys(0).clone()
    context.decode(DecodeBatch([1], [300], [0], []))
    done = Blob(scene.cells.form, context.state(0)).keys(0)[: len(pending)]
    scene.close()
    ours = Scene()
    wanted = rotated(ours.cells.read(ours.rows.cells)[0][0].transpose(0, 1)[END:], START - END)
    ours.rows.drop(ours.block())
    ours.rows.pack()
    saved = ours.rows.save(ours.rows.logical >= END)
    difference = largest(saved.keys(0), wanted)
    ours.close()
    return {"pending": largest(pending, done), "ours": difference}


def check_trap_3_shared_cells() -> Any:
    """llama.cpp's shift moves cells for every sequence that has them; ours moves one session's."""
    scene = Scene(tokens=100)
    binding, context = library.llama(), scene.context
    context.share(0, 1)
    binding.llama_memory_seq_add(context.memory, 1, 50, -1, 7)
    moved = binding.llama_memory_seq_pos_max(context.memory, 0)
    scene.close()
    ours = Scene(tokens=100)
    other = ours.session(1)
    ours.feed(TEXT[:100], other)
    before = [part.clone() for part in ours.cells.read(other.cells)]
    ours.rows.drop(ours.rows.rope < 50)
    ours.rows.pack()
    after = ours.cells.read(other.cells)
    untouched = all(bool(torch.equal(old, new)) for old, new in zip(before, after, strict=True))
    last = binding.llama_memory_seq_pos_max(ours.context.memory, 1)
    ours.close()
    return {"moved": moved, "last": last, "untouched": untouched}


def check_trap_4_the_last_token_evicted() -> Any:
    """llama.cpp refuses to go on behind a hole; ours lets another row stand in for the last one."""
    scene = Scene(tokens=300)
    scene.context.remove(0, 280, 300)
    refused = False
    try:
        scene.context.decode(DecodeBatch([1], [300], [0], []))
    except KVBenchError:
        refused = True
    scene.close()
    plain = Scene(tokens=300)
    wanted = plain.feed(NEXT)
    plain.close()
    ours = Scene(tokens=300)
    tail = ours.rows.rope >= 280
    logical = ours.rows.logical[tail]
    blob = ours.rows.save(tail)
    ours.rows.drop(tail)
    without = ours.feed(NEXT)
    masked = _without_tail()
    ours.rows.next = 300
    ours.rows.drop(ours.rows.rope >= 300)
    ours.rows.restore(blob, logical)
    back = largest(ours.feed(NEXT), wanted)
    labels = bool(torch.equal(ours.rows.labels, ours.rows.rope))
    ours.close()
    return {
        "refused": refused,
        "masked": largest(without, masked),
        "back": back,
        "labels": labels,
    }


def _without_tail() -> torch.Tensor:
    """Return the logits behind tokens 0 to 280 at positions from 300, from a cache built anew."""
    scene = Scene(tokens=280)
    blob = scene.rows.save(scene.rows.rope >= 0)
    blob.set_positions(torch.arange(20, 300))
    scene.context.remove(0)
    scene.cells.load(0, blob)
    scene.rows.next = 300
    logits = scene.feed(NEXT)
    scene.close()
    return logits


def check_trap_5_loading_empties_its_target() -> Any:
    scene = Scene()
    blob, _ = scene.evict()
    data = bytearray(blob.data)
    raw = Scene()
    raw.context.set_state(0, data)
    left = Blob(raw.cells.form, raw.context.state(0)).tokens
    raw.close()
    scene.cells.load(0, blob)
    ours = Blob(scene.cells.form, scene.context.state(0)).tokens
    scene.close()
    return {"raw": left, "ours": ours}


def check_trap_9_quantised_rows() -> Any:
    scene = Scene(Q8, True)
    blob, _ = scene.evict()
    try:
        blob.rotate(5)
        refused = False
    except KVBenchError:
        refused = True
    scene.close()
    return {"refused": refused}


def check_trap_12_holes() -> Any:
    """The highest used cell decides what attention costs; parking and coming back closes holes."""
    scene = Scene()
    scene.rows.drop(scene.rows.rope < 350)
    before = int(scene.rows.cells.max())
    keys, values = scene.cells.read(scene.rows.cells)
    scene.rows.park()
    scene.rows.unpark(2)
    after = int(scene.rows.cells.max())
    again = scene.cells.read(scene.rows.cells)
    same = all(bool(torch.equal(a, b)) for a, b in zip((keys, values), again, strict=True))
    scene.close()
    return {"before": before, "after": after, "same": same}


def check_descent() -> Any:
    """What an event leaves at the top goes down, as far as rows are nobody else's."""
    found = {}
    for flash, row_type in ((False, F32), (True, F16), (True, Q8)):
        said, tops, bytes_ = [], [], []
        for moves in (False, True):
            scene = Scene(row_type, flash)
            other = scene.session(1)
            scene.feed(TEXT[:100], other)
            scene.rows.drop(scene.rows.rope < 360)
            sides = scene.rows, other
            for side in sides * moves:
                side.descend(0)
            tops.append(int(torch.cat([side.cells for side in sides]).max()))
            if row_type != Q8:
                bytes_.append(
                    torch.cat([torch.stack(scene.cells.read(s.cells), -1) for s in sides], 2)
                )
            said.append(torch.cat([scene.feed(NEXT, side) for side in sides]))
            scene.close()
        found[f"{row_type}{flash}"] = {
            "tops": tops,
            "same": row_type == Q8 or bool(torch.equal(*bytes_)),
            "difference": largest(*said),
        }
    return found


def check_trap_14_another_build() -> Any:
    found = {}
    for name, wrong in (("PINNED", "0.3.35"), ("GGML_VERSION", "0.1.0")):
        right = getattr(library, name)
        setattr(library, name, wrong)
        library.llama.cache_clear()
        library.ggml.cache_clear()
        try:
            library.ggml()
            found[name] = ""
        except PrerequisiteError as error:
            found[name] = str(error)
        setattr(library, name, right)
        library.llama.cache_clear()
        library.ggml.cache_clear()
    scene = Scene(tokens=50)
    data = scene.context.state(0)
    for name, spoilt in (("magic", b"\0" + data[1:]), ("length", data + b"\0\0\0\0")):
        try:
            Blob(scene.cells.form, bytearray(spoilt))
            found[name] = ""
        except KVBenchError as error:
            found[name] = str(error)
    scene.close()
    return found


def check_no_shift_on_the_path() -> Any:
    """Evicting, restoring at the end, and packing work with llama.cpp's shift taken away."""
    scene = Scene()
    binding = library.llama()
    shift = binding.llama_memory_seq_add

    def forbidden(*_: object) -> None:
        raise AssertionError("a shift was asked for")

    binding.llama_memory_seq_add = forbidden
    try:
        blob, logical = scene.evict()
        blob.rotate(300)
        scene.rows.restore(blob, logical)
        scene.feed(NEXT)
        scene.rows.drop(scene.rows.rope < 10)
        scene.rows.pack()
        scene.feed(NEXT)
    finally:
        binding.llama_memory_seq_add = shift
    live, following = scene.rows.live, scene.rows.next
    scene.close()
    return {"live": live, "next": following}


def fork(scene: Scene, sequence: int = 1) -> SequenceRows:
    return scene.rows.fork(sequence)


def check_front() -> Any:
    """Rows written before a session's own, in every layout, are as if it had read them."""
    found = {}
    for row_type, flash in ((F32, False), (F16, False), (F32, True), (F16, True)):
        scene = Scene(row_type, flash)
        keys, values = scene.cells.read(scene.rows.cells)
        behind = scene.session(1)
        behind.begin_behind(400)
        behind.make_front()
        for layer in range(LAYERS):
            behind.write_front(layer, keys[layer], values[layer])
        cells = behind.cells.clone()
        behind.make_front()  # its own already
        same = bool(torch.equal(cells, behind.cells))
        other = behind.fork(2)
        other.make_front()
        apart = not set(other.cells.tolist()) & set(cells.tolist())
        other.free()
        found[f"{row_type}{flash}"] = {
            "kept": same,
            "apart": apart,
            "difference": largest(scene.feed(NEXT), scene.feed(NEXT, behind)),
            "logical": behind.logical[:2].tolist(),
        }
        behind.drop_front()
        behind.rewind(0)
        scene.feed(NEXT, behind)  # the positions before stay free
        found[f"{row_type}{flash}"]["first"] = int(behind.rope[0])
        behind.free()
        found[f"{row_type}{flash}"]["used"] = scene.cells.used
        scene.close()
    return found


def check_listening() -> Any:
    """Whoever listens hears every layer's queries, and what it raises is raised."""
    scene, heard = Scene(tokens=1), {}
    shape, watch = scene.context.shape, scene.context.watch
    watch.listen(heard.__setitem__, shape.query_heads, shape.head_dim)
    scene.feed(NEXT)
    same = [bool(torch.equal(heard[i], watch.queries(i, HEADS))) for i in range(LAYERS)]

    def refuse(*_: object) -> None:
        raise KVBenchError("not so")

    watch.listen(refuse, shape.query_heads, shape.head_dim)
    said = ""
    try:
        scene.feed(NEXT)
    except KVBenchError as error:
        said = str(error)
    heard.clear()
    watch.listen(None, shape.query_heads, shape.head_dim)
    scene.context.watch.raise_problem()
    scene.close()
    return {"same": all(same) and len(same) == LAYERS, "said": said, "after": len(heard)}


def check_fork_appends() -> Any:
    """Two sides decode behind the same cells; each says what a session alone says."""
    wanted = []
    for tokens in (NEXT, TEXT[:16]):
        alone = Scene(tokens=300)
        wanted.append(alone.feed(tokens))
        alone.close()
    scene = Scene(tokens=300)
    other = fork(scene)
    shared = scene.cells.used
    found = [scene.feed(NEXT), scene.feed(TEXT[:16], other)]
    used = scene.cells.used
    scene.close()
    difference = max(map(largest, found, wanted))
    return {"shared": shared, "used": used, "difference": difference}


def check_fork_events() -> Any:
    """An event of one side moves rows into holes; the other side keeps its bytes and its cells."""
    found = {}
    for flash, sort in ((False, False), (False, True), (True, False), (True, True)):
        scene = Scene(F16, flash, tokens=300)
        other = fork(scene)
        scene.feed(NEXT, other)
        before, cells = scene.cells.read(scene.rows.cells), scene.rows.cells.clone()
        kept = last_kept(316, 96, 40)
        keys, _ = scene.cells.read(other.cells)
        positions = torch.arange(316).expand(LAYERS, KV_HEADS, -1).clone()
        other.keep(kept, positions, [], sort=sort)
        after, moved = scene.cells.read(scene.rows.cells), scene.cells.read(other.cells)[0]
        gathered = positions[..., :96, None].expand(-1, -1, -1, TINY.head_dim)
        found[f"{flash}{sort}"] = {
            "intact": all(bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)),
            "in place": bool(torch.equal(cells, scene.rows.cells)),
            "rows": bool(torch.equal(moved, keys.gather(2, gathered))),
            # Cells that all heads keep where they are stay shared, if others have them.
            "shared": other.shared,
            "used": scene.cells.used,
        }
        scene.close()
    return found


def last_kept(rows: int, budget: int, last: int) -> torch.Tensor:
    """Sets that differ between heads, but for the last rows, which all have."""
    sets = random_sets(rows - last, budget - last)
    tail = torch.arange(rows - last, rows).expand(LAYERS, KV_HEADS, -1)
    return torch.cat([sets, tail], -1)


def check_fork_changes() -> Any:
    """Whatever else one side does to its rows, and in any order of leaving."""
    works: dict[str, Callable[[SequenceRows], object]] = {
        "hole at the end": lambda rows: rows.drop(rows.rope >= 280),
        "rewound": lambda rows: rows.rewind(120),
        "packed": lambda rows: (rows.drop(rows.rope < 50), rows.pack()),
        "parked": lambda rows: (rows.park(), rows.unpark(2)),
        "a block back": block_back,
    }
    found = {}
    for name, work in works.items():
        scene = Scene(tokens=300)
        other = fork(scene)
        before = scene.cells.read(scene.rows.cells)
        work(other)
        after = scene.cells.read(scene.rows.cells)
        intact = all(bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True))
        last = library.llama().llama_memory_seq_pos_max(scene.context.memory, 0)
        said = scene.feed(NEXT)
        scene.rows.free()
        scene.feed(NEXT, other)  # llama.cpp goes on there too
        other.free()
        found[name] = {"intact": intact and last == 299, "used": scene.cells.used}
        alone = Scene(tokens=300)
        found[name]["difference"] = largest(said, alone.feed(NEXT))
        alone.close()
        scene.close()
    return found


def block_back(rows: SequenceRows) -> None:
    """A row stands in for the last one, and gives its label back as that returns."""
    tail = rows.rope >= 280
    logical, blob = rows.logical[tail], rows.save(tail)
    rows.drop(tail)
    rows.restore(blob, logical)


def check_fork_without_a_sequence() -> Any:
    """It starts outside of the cache, and comes in with the same bytes; all cells come back."""
    scene = Scene(tokens=300, cells=1024)
    other = fork(scene, -1)
    outside = (other.sequence, other.live, other.resident, scene.cells.used)
    twin = other.fork(-1)
    before = scene.cells.read(scene.rows.cells)
    for number, side in ((1, other), (2, twin)):
        side.unpark(number)
    same = all(
        bool(torch.equal(a, b))
        for side in (other, twin)
        for a, b in zip(before, scene.cells.read(side.cells), strict=True)
    )
    used = scene.cells.used
    for side in (scene.rows, other, twin):
        side.free()
    left = scene.cells.used
    scene.rows.next = 0
    for _ in range(4):  # llama.cpp finds every cell free
        scene.feed(TEXT[:256], scene.rows)
    whole = scene.rows.live
    scene.close()
    return {"outside": outside, "same": same, "used": used, "left": left, "whole": whole}


def check_full_cache() -> Any:
    scene = Scene(tokens=200, cells=256)
    blob = scene.rows.save(scene.rows.rope >= 0)
    found = {}
    for name, work in (
        ("decode", lambda: scene.feed(TEXT[:100], scene.session(1))),
        ("load", lambda: scene.cells.load(1, blob)),
    ):
        try:
            work()
            found[name] = ""
        except CapacityError as error:
            found[name] = str(error)
    kept = blob.keys(0).clone()
    found["intact"] = bool(torch.equal(scene.rows.save(scene.rows.rope >= 0).keys(0), kept))
    scene.close()
    return found


def check_aborted_decode() -> Any:
    """The session goes on as if the tokens had never been given."""
    scene = Scene()
    before = bytes(scene.context.state(0))
    scene.context.abort(True)
    try:
        scene.feed(NEXT)
        ended = False
    except DecodeAbortedError:
        ended = True
    scene.context.abort(False)
    same = bytes(scene.context.state(0)) == before
    late, plain = scene.feed(NEXT), Scene().feed(NEXT)
    scene.close()
    return {"ended": ended, "same": same, "difference": largest(late, plain)}


class Holding(PythonWatch):
    """Stays in the middle of every decode until that is aborted, while `holds`."""

    def __init__(self) -> None:
        super().__init__(LAYERS, queries=False)
        self.holds, self.within, self.aborts = False, threading.Event(), threading.Event()

    def abort(self, wanted: bool) -> None:
        super().abort(wanted)
        (self.aborts.set if wanted else self.aborts.clear)()

    def _ask(self, address: int) -> bool:
        if self.holds and not self.aborts.is_set():
            self.within.set()
            self.aborts.wait(LONG)
        return super()._ask(address)


class Readers:
    """Generations of one scheduler, and what each was sent."""

    def __init__(self, watch: Watch) -> None:
        context = Context(MODEL, cells=4096, sequences=8, batch=STEP_TOKENS, watch=watch)
        self.scheduler = BatchScheduler(context, BackendPolicy(Full(), MODEL, MODEL))
        self.said: dict[str, list[bytes]] = {}
        self.streams: dict[str, Stream] = {}

    def start(self, name: str, tokens: list[int], known: int = 0) -> None:
        self.said[name] = []
        stream = self.streams[name] = Stream(self.said[name].append)
        asked = {"session": name, "tokens": tokens, "known": known, "given": []}
        asked |= {"phases": {"labeller_name": TokenPhases.labeller_name}, "stepwise": False}
        asked |= {"predict": False}
        self.scheduler.start(asked, Sampling(8), stream)

    def start_together(self, **prompts: list[int]) -> None:
        """Queue generations, in this order, while a step is under way."""
        until = time.monotonic() + LONG
        for queued, (name, tokens) in enumerate(prompts.items()):
            threading.Thread(target=self.start, args=(name, tokens), daemon=True).start()
            while len(self.scheduler._commands) <= queued and time.monotonic() < until:
                time.sleep(0.01)

    def hang_up(self, name: str) -> None:
        self.streams[name].closed = True
        self.scheduler.wake()

    def ended(self, *names: str) -> bool:
        return all(self.streams[name].ended.wait(LONG) for name in names)


def check_hanging_up_ends_a_chunk() -> Any:
    """A step of two readers ends in its middle when the last of them has hung up."""
    watch = Holding()
    readers = Readers(watch)
    watch.holds = True
    readers.start("first", TEXT)
    found = {"held": watch.within.wait(LONG)}
    readers.start_together(a=TEXT, b=TEXT)
    watch.within.clear()
    readers.hang_up("first")
    found["shared"] = readers.ended("first") and watch.within.wait(LONG)
    readers.hang_up("a")
    found["spared"] = not watch.aborts.is_set()
    watch.holds = False
    readers.hang_up("b")
    found["ended"] = readers.ended("a", "b")
    told = [readers.said[name] for name in ("first", "a", "b")]
    for name, tokens, known in (("a", [], 400), ("b", [], 400), ("other", TEXT, 0)):
        readers.start(name, tokens, known)
        readers.ended(name)
    same = readers.said["a"] == readers.said["b"] == readers.said["other"]
    return found | {"told": [b"".join(each).decode() for each in told], "same": same,
                    "tokens": len(readers.said["other"]) - 1}  # fmt: skip


def check_a_prompt_that_was_cut_off_is_counted_once() -> Any:
    """Its reader hangs up in the second of three chunks and asks again, without another token."""
    watch = Holding()
    readers = Readers(watch)
    context, steps = readers.scheduler.context, []
    decode = context.decode

    def noted(batch: DecodeBatch) -> torch.Tensor:
        steps.append(len(batch.tokens))
        watch.holds = len(steps) == 2
        return decode(batch)

    context.decode = noted
    readers.start("cut", TEXT * 3)
    held = watch.within.wait(LONG)
    readers.hang_up("cut")
    ended = readers.ended("cut")
    sessions = readers.scheduler.sessions
    first = sessions["cut"].stats().prefill_tokens
    for name, tokens, known in (("cut", [], 3 * len(TEXT)), ("other", TEXT * 3, 0)):
        readers.start(name, tokens, known)
        ended = readers.ended(name) and ended
    read = [
        (stats.prefill_tokens, stats.bytes_read, stats.decode_tokens)
        for stats in (sessions[name].stats() for name in ("cut", "other"))
    ]
    same = readers.said["cut"] == readers.said["other"]
    return {"held": held, "ended": ended, "first": first, "read": read, "same": same}


def fed_by_step(**prompts: list[int]) -> dict[str, list[int]]:
    """Return how many tokens of each prompt every step was fed, all queued at once, in order."""
    watch = Holding()
    readers = Readers(watch)
    context, steps = readers.scheduler.context, []
    decode = context.decode

    def noted(batch: DecodeBatch) -> torch.Tensor:
        steps.append(Counter(batch.sequences))
        return decode(batch)

    context.decode = noted
    watch.holds = True
    readers.start("held", TEXT)
    assert watch.within.wait(LONG)
    readers.start_together(**prompts)
    watch.holds = False
    readers.hang_up("held")
    assert readers.ended(*prompts)
    sessions = readers.scheduler.sessions
    return {name: [step[sessions[name].rows.sequence] for step in steps[1:]] for name in prompts}


def check_long_prompts_are_read_one_after_another() -> Any:
    """Two long prompts and a short one."""
    return fed_by_step(first=TEXT * 3, second=TEXT * 3, short=TEXT[:100])


def check_a_prompt_with_less_left_overtakes() -> Any:
    """Prompts of two and four chunks behind one of three."""
    return fed_by_step(first=TEXT * 3, longer=TEXT * 4, shorter=TEXT * 2, short=TEXT[:60])


def trap_1_abort() -> None:
    """Without a unified cache, copying a part of a sequence aborts the process."""
    binding = library.llama()
    defaults = binding.llama_context_default_params

    class Separate:
        """Parameters that refuse to be unified."""

        def __new__(cls) -> Any:
            options = defaults()
            options.__class__ = type("Options", (type(options),), {
                "__setattr__": lambda self, name, value: None
                if name == "kv_unified" else super(type(self), self).__setattr__(name, value)
            })  # fmt: skip
            return options

    binding.llama_context_default_params = Separate
    scene = Scene(tokens=50)
    scene.context.share(0, 1, 10, 20)
    sys.stdout.write("survived\n")


def main() -> None:
    global MODEL
    folder = Path(sys.argv[1])
    MODEL = make_model(folder / "tiny.gguf", TINY)
    torch.set_num_threads(1)
    wanted = sys.argv[2:]
    if wanted == ["abort"]:
        trap_1_abort()
        return
    checks: dict[str, Callable[[], Any]] = {
        name.removeprefix("check_"): check
        for name, check in globals().items()
        if name.startswith("check_") and (not wanted or name.removeprefix("check_") in wanted)
    }
    with torch.inference_mode():
        sys.stdout.write(json.dumps({name: check() for name, check in checks.items()}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # as the server does: a scheduler's thread ends with its process only


if __name__ == "__main__":
    main()
