"""The compiled backends: the C interface of `csrc/kvb.h`, called with tensors' addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentbench_kv.errors import KVBenchError
from agentbench_kv.kernels.build import team_function
from agentbench_kv.kernels.layout import PagedRows, RowsBefore, SeenRows
from agentbench_kv.kernels.torch_backend import TorchBackend

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
GQA = {"mean_prob": 0, "max_prob": 1, "max_logit": 2, "per_head": 3}
_P, _L, _I = c_void_p, c_int64, c_int32


class _Rows(Structure):
    """`PagedRows.in_bytes`, whose tensors have to outlive the call."""

    _fields_: ClassVar = [
        *((name, _P) for name in ("base", "layer_offsets")),
        *((name, _L) for name in ("layer", "head", "block", "row", "bytes")),
    ]


class _Table(Structure):
    _fields_: ClassVar = [
        ("blocks", _P),
        *((name, _L) for name in ("stride", "block_size", "block_shift")),
    ]


class _Shape(Structure):
    _fields_: ClassVar = [(name, _I) for name in ("sessions", "layers", "heads")]


class _Mass(Structure):
    _fields_: ClassVar = [
        ("queries", _P),
        *((name, _I) for name in ("query_dtype", "key_dtype", "gqa", "group", "n", "head_dim")),
        ("keys", _Rows),
        ("table", _Table),
        ("shape", _Shape),
        ("lengths", _P),
        ("length", _L),
        ("query_positions", _P),
        ("key_positions", _Rows),
        *((name, _P) for name in ("valid", "mass")),
    ]


class _Before(Structure):
    _fields_: ClassVar = [("keys", _P), ("values", _P), ("head", _L), ("rows", _L)]


class _Attend(Structure):
    _fields_: ClassVar = [
        ("queries", _P),
        *((name, _L) for name in ("query_session", "query_head", "query_row")),
        ("output", _P),
        *((name, _I) for name in ("dtype", "group", "n", "head_dim")),
        *((name, _Rows) for name in ("keys", "values")),
        ("shape", _Shape),
        ("lengths", _P),
        *((name, _L) for name in ("length", "window")),
        *((name, _P) for name in ("sinks", "before")),
        ("scale", c_float),
    ]


_ENDING = [_I, _P]  # threads and stream, the last arguments of every operation
_SIGNATURES: dict[str, list[Any]] = {
    "kvb_compact": [POINTER(_Rows), _I, _Table, _Shape, _P, _L, _P, _I, _P],
    "kvb_select_top": [_P, _P, _P, _L, _L, _L, _P],
    "kvb_ring_write": [_P, _I, _L, _L, _P, _I, _L, _L, _P, _L, _L, _L],
    "kvb_rope_rotate": [_Rows, _I, _Table, _Shape, _P, _L, _P, _L, _L, _L, _P, _I, _I],
    "kvb_aabb": [_P, _I, _L, _L, _L, _L, _L, _L, _P, _P],
    "kvb_similarity": [_P, _I, _L, _L, _L, _L, _L, c_float, _P, _P],
}
_OF_CPU: dict[str, list[Any]] = {
    "kvb_attention": [POINTER(_Attend)],
    "kvb_attention_mass": [POINTER(_Mass)],
    "kvb_aabb_score": [_P, _P, _P, _L, _L, _L, _L, _L, _P],
}
_WORKSPACES: dict[str, list[Any]] = {  # bytes that an operation needs
    "kvb_similarity_workspace": [_L, _L, _L],
}


class NativeBackend:
    """Operations of one compiled library; `kernels.ops` and `kernels.paged` say what they do."""

    def __init__(self, name: str, path: Path, about: str = "") -> None:
        self.name = name
        self.path = path
        self.about = about
        self._library = ctypes.CDLL(str(path))
        self._of_cpu = hasattr(self._library, "kvb_attention")
        own = _OF_CPU if self._of_cpu else {}
        for symbol, arguments in (_SIGNATURES | own).items():
            getattr(self._library, symbol).argtypes = [*arguments, *_ENDING]
        self._library.kvb_error.restype = c_char_p
        for symbol, arguments in _WORKSPACES.items():
            getattr(self._library, symbol).argtypes = arguments
            getattr(self._library, symbol).restype = c_int64
        self._library.kvb_use_team.argtypes = [c_void_p]
        self._library.kvb_use_team(team_function())

    def ring_write(self, ring: Tensor, rows: Tensor, slots: Tensor) -> None:
        if ring.dtype not in DTYPES or (ring.shape[2] > 1 and ring.stride(2) != 1):
            return TorchBackend().ring_write(ring, rows, slots)
        rows = _innermost(_floating(rows, ring.dtype))
        slots = _whole(slots, torch.int64)  # named: it has to outlive the call
        heads, width = ring.shape[1:]
        self._call(
            "kvb_ring_write",
            ring.device,
            *(ring.data_ptr(), DTYPES[ring.dtype], ring.stride(0), ring.stride(1)),
            *(rows.data_ptr(), DTYPES[rows.dtype], rows.stride(0), rows.stride(1)),
            *(slots.data_ptr(), rows.shape[0], heads, width),
        )

    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        seen: SeenRows,
        scaling: float,
        sinks: Tensor | None,
        before: Sequence[RowsBefore | None],
    ) -> Tensor:
        dtype = queries.dtype
        alike = dtype in DTYPES and {keys.dtype, values.dtype} == {dtype}
        if not (alike and self._of_cpu):
            return TorchBackend().attention(queries, keys, values, seen, scaling, sinks, before)
        queries, keys, values = (_innermost(each) for each in (queries, keys, values))
        sessions, heads, n, head_dim = queries.shape
        kv_heads, size = keys.shape[1], dtype.itemsize
        output = torch.empty(sessions, n, heads, head_dim, dtype=dtype)
        lengths, sinks = _whole(seen.lengths, torch.int64), _maybe(sinks, torch.float32)
        rows_before = _before(before)
        job = _Attend(
            *(queries.data_ptr(), *(step * size for step in queries.stride()[:3])),
            *(output.data_ptr(), DTYPES[dtype], heads // kv_heads, n, head_dim),
            *(_session_rows(keys), _session_rows(values), _Shape(sessions, 1, kv_heads)),
            *(lengths.data_ptr(), seen.longest, seen.window or 0, _address(sinks)),
            *(None if rows_before is None else ctypes.addressof(rows_before), scaling),
        )
        self._call("kvb_attention", queries.device, byref(job))
        return output

    def attention_mass(
        self,
        queries: Tensor,
        keys: Tensor,
        gqa: str,
        query_positions: Tensor | None,
        key_positions: Tensor | None,
    ) -> Tensor:
        if not self._of_cpu:
            return TorchBackend().attention_mass(queries, keys, gqa, query_positions, key_positions)
        seen = places = None
        if query_positions is not None and key_positions is not None:
            seen, places = query_positions[None], PagedRows((key_positions[:, None].long(),))
        rows, length = PagedRows((_innermost(_floating(keys))[:, None],)), keys.shape[1]
        mass = self.attention_mass_paged(
            queries[None, None], rows, None, None, length, gqa, seen, places, None
        )
        return mass[0, 0]

    def attention_mass_paged(
        self,
        queries: Tensor,
        keys: PagedRows,
        table: Tensor | None,
        lengths: Tensor | None,
        length: int,
        gqa: str,
        query_positions: Tensor | None,
        key_positions: PagedRows | None,
        valid: Tensor | None,
    ) -> Tensor:
        if not self._of_cpu or keys.layers[0].dtype not in DTYPES:
            return TorchBackend().attention_mass_paged(
                queries, keys, table, lengths, length, gqa, query_positions, key_positions, valid
            )
        queries = _floating(queries).contiguous()
        sessions, layers, q_heads, n, head_dim = queries.shape
        group = q_heads // keys.kv_heads
        outputs = (group,) if gqa == "per_head" else ()
        shape = (sessions, layers, keys.kv_heads, *outputs, length)
        mass = torch.empty(shape, dtype=torch.float32, device=queries.device)
        lengths, table = _maybe(lengths, torch.int64), _maybe(table, torch.int32)
        query_positions = _maybe(query_positions, torch.int64)
        valid = _maybe(valid, torch.bool)
        at = _Rows() if key_positions is None else _Rows(*key_positions.in_bytes)
        job = _Mass(
            *(queries.data_ptr(), DTYPES[queries.dtype], DTYPES[keys.layers[0].dtype]),
            *(GQA[gqa], group, n, head_dim, _Rows(*keys.in_bytes), _table(table, keys)),
            *(_Shape(sessions, layers, keys.kv_heads), _address(lengths), length),
            *(_address(query_positions), at, _address(valid), mass.data_ptr()),
        )
        self._call("kvb_attention_mass", queries.device, byref(job))
        return mass

    def select_top(
        self, scores: Tensor, budget: int, always: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        if scores.dtype not in DTYPES:  # wider ones, which no method has
            return TorchBackend().select_top(scores, budget, always, positions)
        *lead, tokens = scores.shape
        budget = min(budget, tokens)
        scores = scores.float().contiguous()
        marks = None if always is None else _whole(always.expand(scores.shape), torch.bool)
        places = None if positions is None else _whole(positions.expand(scores.shape), torch.int64)
        indices = torch.empty((*lead, budget), dtype=torch.int64, device=scores.device)
        rows = indices[..., 0].numel() if budget else 0
        self._call(
            "kvb_select_top",
            scores.device,
            *(scores.data_ptr(), _address(marks), _address(places)),
            *(rows, tokens, budget, indices.data_ptr()),
        )
        return indices

    def compact(self, caches: Sequence[Tensor], kept: Tensor, length: int, sort: bool) -> int:  # noqa: ARG002
        rows = [_plain_rows(each) for each in caches]
        return int(self._compact(rows, _Table(None, 0, 1, 0), kept[None], None, sort))

    def compact_paged(
        self,
        tensors: Sequence[PagedRows],
        table: Tensor | None,
        kept: Tensor,
        counts: Tensor | None,
        sort: bool,
    ) -> Tensor:
        table = _maybe(table, torch.int32)
        rows = [_Rows(*each.in_bytes) for each in tensors]
        return self._compact(rows, _table(table, tensors[0]), kept, counts, sort)

    def _compact(
        self, rows: Sequence[_Rows], table: _Table, kept: Tensor, counts: Tensor | None, sort: bool
    ) -> Tensor:
        # The count stays on the device: reading it would wait for a GPU.
        kept, counts = _whole(kept, torch.int64), _maybe(counts, torch.int64)
        moved = torch.zeros((), dtype=torch.int64, device=kept.device)
        self._call(
            "kvb_compact",
            kept.device,
            *((_Rows * len(rows))(*rows), len(rows), table, _Shape(*kept.shape[:3])),
            *(kept.data_ptr(), kept.shape[3], _address(counts), int(sort), moved.data_ptr()),
        )
        return moved

    def rope_rotate(
        self,
        keys: PagedRows,
        table: Tensor | None,
        lengths: Tensor | None,
        shifts: Tensor,
        frequencies: Tensor,
        interleaved: bool,
    ) -> None:
        if keys.layers[0].dtype not in DTYPES:
            return TorchBackend().rope_rotate(
                keys, table, lengths, shifts, frequencies, interleaved
            )
        sessions, layers, heads, length = shifts.shape
        shifts = _innermost(shifts.to(torch.int64))
        lengths, table = _maybe(lengths, torch.int64), _maybe(table, torch.int32)
        frequencies = frequencies.double().contiguous()
        self._call(
            "kvb_rope_rotate",
            shifts.device,
            *(_Rows(*keys.in_bytes), DTYPES[keys.layers[0].dtype], _table(table, keys)),
            *(_Shape(sessions, layers, heads), _address(lengths), length),
            *(shifts.data_ptr(), shifts.stride(0), shifts.stride(1), shifts.stride(2)),
            *(frequencies.data_ptr(), len(frequencies), int(interleaved)),
        )

    def aabb(self, keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
        keys = _innermost(_floating(keys))
        heads, tokens, head_dim = keys.shape
        shape = (heads, -(-tokens // block), head_dim)
        lows, highs = (torch.empty(shape, device=keys.device) for _ in range(2))
        self._call(
            "kvb_aabb",
            keys.device,
            *(keys.data_ptr(), DTYPES[keys.dtype], keys.stride(0), keys.stride(1)),
            *(heads, tokens, head_dim, block, lows.data_ptr(), highs.data_ptr()),
        )
        return lows, highs

    def aabb_score(self, queries: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
        if not self._of_cpu:
            return TorchBackend().aabb_score(queries, lows, highs)
        queries, lows, highs = (each.float().contiguous() for each in (queries, lows, highs))
        q_heads, n, head_dim = queries.shape
        kv_heads, blocks, _ = lows.shape
        scores = torch.empty(q_heads, n, blocks, device=queries.device)
        self._call(
            "kvb_aabb_score",
            queries.device,
            *(queries.data_ptr(), lows.data_ptr(), highs.data_ptr(), q_heads, n),
            *(q_heads // kv_heads, blocks, head_dim, scores.data_ptr()),
        )
        return scores

    def similarity_column_mean(self, keys: Tensor, threshold: float) -> Tensor:
        keys = _innermost(_floating(keys))
        heads, tokens, head_dim = keys.shape
        means = torch.empty(heads, tokens, device=keys.device)
        needed = self._library.kvb_similarity_workspace(heads, tokens, head_dim)
        workspace = torch.empty(needed, dtype=torch.uint8, device=keys.device)
        self._call(
            "kvb_similarity",
            keys.device,
            *(keys.data_ptr(), DTYPES[keys.dtype], keys.stride(0), keys.stride(1)),
            *(heads, tokens, head_dim, threshold, means.data_ptr(), workspace.data_ptr()),
        )
        return means

    def _call(self, symbol: str, device: torch.device, *arguments: Any) -> None:
        function = getattr(self._library, symbol)
        if device.type == "cuda":
            with torch.cuda.device(device):
                stream = torch.cuda.current_stream(device).cuda_stream
                code = function(*arguments, 0, stream)
        else:
            code = function(*arguments, torch.get_num_threads(), None)
        if code:
            said = self._library.kvb_error(code).decode(errors="replace")
            raise KVBenchError(f"{symbol} on {device} failed: {said}")


def _floating(tensor: Tensor, wanted: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor in a dtype the kernels read."""
    return tensor if tensor.dtype in DTYPES else tensor.to(wanted)


def _innermost(tensor: Tensor) -> Tensor:
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor as the kernels read it: itself, if it already is."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


def _maybe(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else _whole(tensor, dtype)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _table(table: Tensor | None, rows: PagedRows) -> _Table:
    size = rows.block_size
    shift = size.bit_length() - 1 if size & (size - 1) == 0 else -1
    where = (None, 0) if table is None else (table.data_ptr(), table.stride(0))
    return _Table(*where, size, shift)


def _before(sessions: Sequence[RowsBefore | None]) -> Any:
    if not any(sessions):
        return None
    rows = [
        _Before()
        if each is None
        else _Before(
            *(each.keys.data_ptr(), each.values.data_ptr()),
            *(each.keys.stride(0) * each.keys.itemsize, each.keys.shape[1]),
        )
        for each in sessions
    ]
    return (_Before * len(rows))(*rows)


def _session_rows(cache: Tensor) -> _Rows:
    """Describe one layer's rows [sessions, heads, capacity, head_dim]."""
    session, head, row = (stride * cache.itemsize for stride in cache.stride()[:3])
    return _Rows(cache.data_ptr(), None, 0, head, session, row, cache.shape[3] * cache.itemsize)


def _plain_rows(cache: Tensor) -> _Rows:
    """Describe a contiguous cache [layers, heads, capacity, ...] of one session."""
    layer, head, row = (stride * cache.itemsize for stride in cache.stride()[:3])
    size = cache.shape[3:].numel() * cache.itemsize
    return _Rows(cache.data_ptr(), None, layer, head, 0, row, size)
