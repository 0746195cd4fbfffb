"""Finding the OpenMP team that PyTorch's operations run on, for the CPU kernels to share.

Threads of an OpenMP runtime wait actively for some time after each parallel operation. Kernels with
threads of their own would compete with them for the same cores.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")


def team_function() -> int | None:
    """Return the address of `GOMP_parallel` in the runtime this process has loaded, if any.

    GNU's, Intel's and LLVM's runtimes all have it; of several, the one in PyTorch's folder counts.
    """
    for path in _loaded_runtimes():
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _loaded_runtimes() -> list[str]:
    """Return the OpenMP libraries among the files this process has mapped, PyTorch's first."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.partition("/")[1] + line.partition("/")[2] for line in lines)
    return sorted(filter(_RUNTIME.search, paths), key=lambda path: "torch" not in path)
