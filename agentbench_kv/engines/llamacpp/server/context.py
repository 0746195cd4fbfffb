"""One llama.cpp context: a unified cache, batches over many sequences, and the watch on it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentbench_kv.engines.llamacpp.models import read_shape
from agentbench_kv.engines.llamacpp.server.library import GgmlTensor, ggml, llama, muted, tensor_at
from agentbench_kv.engines.llamacpp.server.watch import Watch, make_watch
from agentbench_kv.errors import CapacityError, KVBenchError, PrerequisiteError, UsageError

MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
YARN = 2  # LLAMA_ROPE_SCALING_TYPE_YARN
ROPE_TYPES = {False: 2, True: 0}  # llama.cpp's numbers for halves and for neighbouring pairs


ABORTED = 2  # what `llama_decode` returns


class DecodeAbortedError(KVBenchError):
    """A decode was told to stop (`Context.abort`); the cache is as it was before."""


@dataclass
class DecodeBatch:
    """Tokens of one decode: sequence by sequence, positions ascending within each."""

    tokens: list[int]
    positions: list[int]
    sequences: list[int]
    wanted: list[int]  # indices of the tokens whose logits are asked for


class Context:
    """A model file with a cache of `cells` tokens for all its sequences together."""

    def __init__(
        self,
        path: Path,
        *,
        cells: int,  # rounded up to a multiple of 256
        sequences: int,  # at once, a scratch one included
        row_type: int = 0,  # ggml's number of the type of cached rows
        batch: int = 512,  # most tokens of a decode
        queries: bool = False,  # whether to keep the queries of every decode
        threads: int = 1,
        context_limit: int = 0,  # of a session; 0 for what the file says
        flash: bool = False,  # values lie by rows, as quantised ones must; sums in half precision
        watch: Watch | None = None,  # instead of the best there is
    ) -> None:
        self._llama = llama()
        ggml()
        self.shape = read_shape(path, context_limit)
        self.watch = watch or make_watch(self.shape.layers, queries)
        self.row_type = row_type
        self.flash = flash
        self.scratch = min(sequences, MOST_SEQUENCES) - 1
        self._model = self._load(path)
        self.handle = self._start(cells, batch, threads, flash)  # `llama_context *`
        self.memory = self._llama.llama_get_memory(self.handle)
        self.cells = int(self._llama.llama_n_ctx(self.handle))
        self._batch = self._llama.llama_batch_init(batch, 0, 1)
        self._warm_up()

    def _load(self, path: Path) -> Any:
        binding, shape = self._llama, self.shape
        options = binding.llama_model_default_params()
        options.n_gpu_layers = 0
        model = binding.llama_model_load_from_file(str(path).encode(), options)
        if not model:
            raise PrerequisiteError(f"llama.cpp cannot load {path}; make or download it again")
        # What the file's header did not give away.
        if binding.llama_model_is_recurrent(model) or binding.llama_model_is_hybrid(model):
            raise UsageError("the model has recurrent layers, which have no rows to save")
        if binding.llama_model_n_swa(model):
            raise UsageError("the model attends in sliding windows, which forget rows")
        if binding.llama_model_rope_type(model) != ROPE_TYPES[shape.interleaved]:
            raise UsageError(f"the RoPE of {shape.architecture} is not the one expected")
        return model

    def _start(self, cells: int, batch: int, threads: int, flash: bool) -> Any:
        options = self._llama.llama_context_default_params()
        options.n_ctx, options.n_seq_max = cells, self.scratch + 1
        options.n_batch = options.n_ubatch = batch
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = int(flash)
        options.type_k = options.type_v = self.row_type
        if yarn := self.shape.yarn:
            options.rope_scaling_type = YARN
            options.rope_freq_scale, options.yarn_orig_ctx = 1 / yarn.factor, yarn.original
        # Without it, copying a part of a sequence aborts the process.
        options.kv_unified = True
        options.no_perf = True
        options.cb_eval = self.watch.callback
        options.cb_eval_user_data = self.watch.data
        options.abort_callback = self.watch.abort_callback
        options.abort_callback_data = self.watch.data
        context = self._llama.llama_init_from_model(self._model, options)
        if not context:
            raise PrerequisiteError(
                f"llama.cpp cannot make a cache of {cells} tokens; lower --engine-arg cells=N"
            )
        return context

    def _warm_up(self) -> None:
        """Decode one token, so that the watch learns where the cache lies; forget it again."""
        self.decode(DecodeBatch([0], [0], [self.scratch], []))
        self._llama.llama_memory_clear(self.memory, True)
        for kind in "kv":
            if not ggml().ggml_backend_buffer_is_host(self.tensor(kind, 0).buffer):
                raise PrerequisiteError("the cache is not in host memory; build without a GPU")

    def tensor(self, kind: str, layer: int) -> GgmlTensor:
        """Return the cache tensor of `kind` `k` or `v` in a layer."""
        address = self.watch.base(kind, layer)
        if not address:
            raise KVBenchError("the cache has not been seen yet")
        return tensor_at(address)

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """Run the model; return logits [wanted, vocabulary], a copy; CapacityError without room."""
        # A sequence's next position must follow its last one, or llama.cpp refuses the batch.
        raw = self._batch
        raw.n_tokens = len(batch.tokens)
        wanted = set(batch.wanted)
        for i, token in enumerate(batch.tokens):
            raw.token[i], raw.pos[i] = token, batch.positions[i]
            raw.n_seq_id[i], raw.seq_id[i][0] = 1, batch.sequences[i]
            raw.logits[i] = i in wanted
        self.watch.begin()
        code = self._llama.llama_decode(self.handle, raw)
        self.watch.raise_problem()
        if code == 1:
            raise CapacityError(f"the cache of {self.cells} tokens is full")
        if code == ABORTED:
            raise DecodeAbortedError("the decode was aborted")
        if code:
            raise KVBenchError(f"llama.cpp refused a batch (code {code})")
        logits = np.empty((len(batch.wanted), self.shape.vocabulary), np.float32)
        for row, index in zip(logits, batch.wanted, strict=True):
            found = self._llama.llama_get_logits_ith(self.handle, index)
            row[:] = np.ctypeslib.as_array(found, row.shape)
        return torch.from_numpy(logits)

    def abort(self, wanted: bool) -> None:
        """Have the decode under way end at its next operation, or no longer; from any thread."""
        (muted.set if wanted else muted.clear)()
        self.watch.abort(wanted)

    def remove(self, sequence: int, start: int = -1, end: int = -1) -> None:
        """Drop a sequence's cells whose positions are in [start, end); -1: from or to the end."""
        if not self._llama.llama_memory_seq_rm(self.memory, sequence, start, end):
            raise KVBenchError("llama.cpp cannot drop a part of this sequence")

    def share(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Make a sequence's cells in [start, end) also the target's; nothing is copied."""
        self._llama.llama_memory_seq_cp(self.memory, source, target, start, end)

    def state(self, sequence: int) -> bytearray:
        """Return the cells of a sequence in llama.cpp's state format."""
        size = self._llama.llama_state_seq_get_size(self.handle, sequence)
        data = bytearray(size)
        view = (ctypes.c_uint8 * size).from_buffer(data)
        got = self._llama.llama_state_seq_get_data(self.handle, view, size, sequence)
        if got != size:
            raise KVBenchError(f"llama.cpp wrote {got} bytes of a state of {size}")
        return data

    def set_state(self, sequence: int, data: bytearray) -> None:
        """Replace a sequence by the cells in `data`."""
        view = (ctypes.c_uint8 * len(data)).from_buffer(data)
        got = self._llama.llama_state_seq_set_data(self.handle, view, len(data), sequence)
        if got != len(data):
            raise self.no_room()

    def no_room(self) -> CapacityError:
        return CapacityError(f"the cache of {self.cells} tokens has no room for a block")

    def close(self) -> None:
        if self.handle:
            self._llama.llama_batch_free(self._batch)
            self._llama.llama_free(self.handle)
            self._llama.llama_model_free(self._model)
            self.handle = None
