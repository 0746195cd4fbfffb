"""Logits as SGLang computes them: a plug-in that writes them down, and who reads them.

`register` runs inside SGLang and needs nothing but torch; the rest runs in the tests.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = "KVBENCH_TEST_LOGITS"
TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.sample"


@dataclass(frozen=True)
class Row:
    """What one forward said of one session.

    Attributes
    ----------
    position : int
        Logical position that the logits predict.
    place : tuple of int
        Requests in the forward, and which of them it was.
    logits : Tensor [vocab], float32
    """

    position: int
    place: tuple[int, int]
    logits: Tensor


def register() -> None:
    """Write down the logits of every forward, as they are before anything is sampled."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    folder, numbers = Path(os.environ[FOLDER]), itertools.count()

    def sample(original: Any, runner: Any, output: Any, forward: Any) -> Any:
        ends = torch.arange(len(forward.rids))
        if not forward.forward_mode.is_decode():
            ends = forward.extend_seq_lens.cumsum(0) - 1
        document = {
            "sessions": [rid.rpartition(".")[0] for rid in forward.rids],
            "positions": (forward.positions[ends] + 1).tolist(),
            "logits": output.next_token_logits.float().clone(),
        }
        path = folder / f"{next(numbers):06d}.pt"
        torch.save(document, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)
        return original(runner, output, forward)

    HookRegistry.register(TARGET, sample, HookType.AROUND)


@contextmanager
def written_down(folder: Path) -> Iterator[None]:
    """Let servers that are started meanwhile write their logits to `folder`."""
    import pytest

    from agentbench_kv.engines.sglang.engine import SglangEngineWire

    path = _plug_in(folder / "path")
    launch = SglangEngineWire.launch

    def with_logits(wire: SglangEngineWire) -> Any:
        plain = launch(wire)
        more = {
            "PYTHONPATH": f"{plain.environment['PYTHONPATH']}{os.pathsep}{path}",
            FOLDER: str(folder),
        }
        return replace(plain, environment={**plain.environment, **more})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SglangEngineWire, "launch", with_logits)
        yield


def rows(folder: Path, session: str) -> list[Row]:
    """Return what was written of a session, by the backend's name for it, in order."""
    found = []
    for path in sorted(folder.glob("*.pt")):
        document = torch.load(path, weights_only=True)
        names = document["sessions"]
        for index, name in enumerate(names):
            if name == session:
                place = len(names), index
                found.append(Row(document["positions"][index], place, document["logits"][index]))
    return found


def _plug_in(path: Path) -> Path:
    """Fill a folder with this file and the metadata by which SGLang finds plug-ins."""
    info = path / "sglang_logits-0.dist-info"
    info.mkdir(parents=True)
    (path / Path(__file__).name).symlink_to(__file__)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-logits\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nlogits = sglang_logits:register\n"
    )
    return path
