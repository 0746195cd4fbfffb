"""Numbers for JSON."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def listed(values: Tensor) -> Any:
    """Return nested lists, or a number, with None for NaN and infinities: JSON has neither."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return plain(values.tolist())
