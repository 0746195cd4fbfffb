"""What all tests share."""

from __future__ import annotations

import os

# Tiny tensors on a shared machine: threads only cost time, here and in the processes tests start.
# Before anything imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
