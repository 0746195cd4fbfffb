"""Which presses of NVIDIA's kvpress 0.5 run as methods, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """What is known of a press of kvpress 0.5: which rows score highest, and what it looks at."""

    first: int | str = 0  # number of rows, or the argument that holds it
    last: int | str = 0
    queries: bool = False
    heads_alike: bool = True
    # A setting under which it draws from torch's own generator.
    unrepeatable: tuple[str, Any] | None = None


FIT: Mapping[str, Traits] = {
    "CURPress": Traits(first="num_sinks", unrepeatable=("use_random_leverage", True)),
    "KeyDiffPress": Traits(),
    "KnormPress": Traits(),
    "LagKVPress": Traits(first="n_sink", last="lag_size"),
    "RandomPress": Traits(heads_alike=False, unrepeatable=("seed", None)),
    "SnapKVPress": Traits(last="window_size", queries=True),
    "StreamingLLMPress": Traits(first="n_sink"),
    "TOVAPress": Traits(last=1, queries=True),
}
# Reason -> the presses that are refused for it, by name.
UNFIT: Mapping[str, str] = {
    "it needs the hidden states of every token, which no engine keeps": (
        "CapPress CompactorPress ExpectedAttentionPress LeverageScorePress NonCausalAttnPress"
    ),
    "it needs the attention of every query; --method h2o@kvpress is the same": (
        "ObservedAttentionPress"
    ),
    "it needs weights or statistics made for one model": (
        "DuoAttentionPress ExpectedAttentionStatsPress FastKVzipPress KVzapPress QFilterPress"
    ),
    "it needs several passes over the prompt": (
        "KVComposePress KVgradPress KVzipPress RestoreKVPress"
    ),
    "it wraps another press, which must be named by itself": (
        "AdaKVPress BlockPress CAMPress ChunkKVPress ChunkPress ComposedPress "
        "CompressionRatioDecodingPress CriticalAdaKVPress CriticalKVPress DMSPress DecodingPress "
        "EntropyGatedChunkKVPress KeyRerotationPress LUKVPress MergingPress "
        "PerLayerCompressionPress PrefillDecodingPress"
    ),
    "it gives layers budgets of their own; SnapKVPress scores alike": "PyramidKVPress",
    "it compresses some layers and leaves others": "SimLayerKVPress",
    "it removes channels of keys, not tokens": "ThinKPress",
    "it needs a delimiter between context and question": "FinchPress",
    "it is a base class": "BasePress ScorerPress",
}
