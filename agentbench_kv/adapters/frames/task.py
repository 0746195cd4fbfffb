"""FRAMES over an imported corpus, and a synthetic variant that proves the plumbing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agentbench_kv.adapters.browser.made import Question
from agentbench_kv.adapters.browser.task import BrowsingTask
from agentbench_kv.adapters.data import data_file, file_sha256
from agentbench_kv.adapters.frames.data import FILE, HINT, SHA256, SPLITS, choose, read_questions
from agentbench_kv.params import param


@dataclass(kw_only=True, eq=False)
class FramesTest(BrowsingTask):
    """The 824 questions of google/frames-benchmark. The corpus is the user's: none is published."""

    name: ClassVar[str] = "frames/test"
    summary: ClassVar[str] = "FRAMES: 824 multi-hop questions, browsing a corpus of yours"
    published_sha256: ClassVar[str | None] = SHA256

    split: str = param("all", "all 824, or kvbench-424: a choice of ours", choices=SPLITS)

    def questions(self) -> list[Question]:
        return choose(read_questions(self._file()), self.split)

    def data_provenance(self) -> dict[str, Any]:
        ids = "\n".join(sample.id for sample in self.samples(None, 0))
        ours = "chosen by kvbench; no publication uses this split"
        return {
            "data_sha256": file_sha256(self._file()),
            "split": self.split,
            "split_ids_sha256": hashlib.sha256(ids.encode()).hexdigest(),
            "split_note": None if self.split == "all" else ours,
        }

    def _file(self) -> Path:
        return data_file(FILE, self.published_sha256, HINT)


@dataclass(kw_only=True, eq=False)
class FramesSynthetic(FramesTest):
    """The same loop over made pages that hold the answers: never a FRAMES result."""

    name: ClassVar[str] = "frames/synthetic"
    summary: ClassVar[str] = "plumbing of frames/test over made pages; not a FRAMES result"
    synthetic: ClassVar[bool] = True
    published_sha256: ClassVar[str | None] = None
