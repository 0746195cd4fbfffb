"""The queries of a forward, as attention layers show them, on their way to a method's rings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from agentbench_kv.engines.core.rings import QueryBuffer, RingWrite

# Adds up what one layer's queries [rows, q_heads, head_dim] of a forward attend to.
AddSums = Callable[[int, Tensor], None]


class QueryCapture:
    """The queries of the forward that is running in this worker.

    A replayed CUDA graph runs no Python, so batches of up to `buffered` rows, which may be
    captured, are copied into buffers that live as long as the graph; `finish` takes them from
    there. Those of larger ones are taken as each layer runs, and none are kept: queries of all
    layers would be memory that nobody reserved.
    """

    def __init__(self) -> None:
        self._layers: Mapping[str, int] = {}
        self._rings: QueryBuffer | None = None
        self._add_sums: AddSums | None = None
        self._buffers: Tensor | None = None  # [layers, rows, q_heads, head_dim]
        self._write: RingWrite | None = None
        self._rows = 0
        self._seen: set[int] = set()

    @property
    def buffered(self) -> int:
        """Rows of the static buffers; 0 without any."""
        return 0 if self._buffers is None else self._buffers.shape[1]

    def connect(
        self, layers: Mapping[str, int], rings: QueryBuffer, add_sums: AddSums | None = None
    ) -> None:
        """Name the layers (vLLM's name -> index), their rings, and who adds up attention if any."""
        if layers != self._layers:
            self._seen.clear()
        self._layers = layers
        self._rings = rings
        self._add_sums = add_sums

    def allocate(self, rows: int, layers: int, shape: tuple[int, int], like: Tensor) -> None:
        """Make static buffers [rows, q_heads, head_dim] of all layers, unless there are such.

        Before vLLM looks how much memory its cache may take, and before graphs are captured.
        """
        if self._buffers is None or self._buffers.shape[:2] != (layers, rows):
            self._buffers = like.new_zeros(layers, rows, *shape)

    def begin(self, write: RingWrite | None, rows: int) -> None:
        self._write = write
        self._rows = rows

    def see(self, layer_name: str, query: Tensor) -> None:
        """Take one layer's queries [rows, q_heads, head_dim]; rows past the batch's are padding."""
        layer = self._layers.get(layer_name)
        if layer is None:
            return
        self._seen.add(layer)
        if self._buffers is not None and len(query) <= self.buffered:
            self._buffers[layer][: len(query)].copy_(query)
        elif self._write is not None and self._rings is not None:
            self._rings.write(layer, query[: self._rows].transpose(0, 1), self._write)

    def attended(self, layer_name: str, query: Tensor) -> None:
        """Add up the attention of queries that `see` was shown; their keys are in the cache now.

        Not of those in buffers: where a graph is replayed nobody comes by here.
        """
        layer = self._layers.get(layer_name)
        if layer is None or self._add_sums is None or len(query) <= self.buffered:
            return
        if self._rows:  # none: vLLM tries itself out
            self._add_sums(layer, query[: self._rows])

    def finish(self) -> None:
        """Write the rings and add up attention from the buffers, if this forward went through them.

        Every layer must have shown its queries by now: in this forward, or when its graph was
        captured. Otherwise the rings hold nothing, and a method would rank by that.
        """
        wanted = self._write is not None or self._add_sums is not None
        if wanted and (missing := [n for n, i in self._layers.items() if i not in self._seen]):
            raise ValueError(
                f"kvbench: {len(missing)} of {len(self._layers)} attention layers show no queries "
                f"({missing[0]}, ...); use another attention backend (--engine-arg "
                "attention-backend=FLASH_ATTN)"
            )
        if self._buffers is not None and self._rows <= self.buffered:
            if self._write is not None and self._rings is not None:
                chosen = self._buffers[:, self._write.rows]
                self._rings.write_all(chosen, self._write.slots)
            if self._add_sums is not None:
                for layer, queries in enumerate(self._buffers[:, : self._rows]):
                    self._add_sums(layer, queries)
        self._write, self._rows = None, 0
