"""What the rows of a past session depend on, in the files that they are kept in."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from agentbench_kv import __version__
from agentbench_kv.engines.embedded.model import IN_MEMORY, LoadedModel
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import describe_backend
from agentbench_kv.methods.memory.files import PastFiles


def past_files(folder: Path, model: LoadedModel, kv_dtype: str) -> PastFiles:
    """Return the files of past sessions as this model reads them, on this kind of machine.

    UsageError for a model that is not from files: nothing tells it from another one.
    """
    if model.sha == IN_MEMORY:
        raise UsageError("banks are kept of models from files only: this one is in memory alone")
    shape, frequencies = model.shape, model.frequencies.float().cpu().numpy()
    device = shape.device
    about = {
        "kvbench": __version__,
        "torch": torch.__version__,
        "kernels": describe_backend(device),
        "processor": torch.backends.cpu.get_cpu_capability()
        if device.type == "cpu"
        else torch.cuda.get_device_name(device),
        "model": model.sha,
        "dtype": str(shape.dtype),
        "kv_dtype": kv_dtype,
        # A longer context turns keys by other angles.
        "rope": hashlib.sha256(frequencies.tobytes()).hexdigest(),
        "rope_scale": repr(model.rope_scale),
    }
    return PastFiles(folder, about, (shape.layers, shape.kv_heads, shape.head_dim), shape.dtype)
