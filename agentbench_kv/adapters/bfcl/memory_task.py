"""BFCL v4 memory: questions about conversations that only a memory tool has kept."""

from __future__ import annotations

import subprocess
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain as joined
from itertools import zip_longest
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, TrialContext
from agentbench_kv.adapters.bfcl.chains import Chain
from agentbench_kv.adapters.bfcl.entries import backend_of
from agentbench_kv.adapters.bfcl.memory_worker import HASH_ENCODER
from agentbench_kv.adapters.bfcl.task import BfclTask, Played
from agentbench_kv.adapters.data import file_sha256
from agentbench_kv.adapters.worker import Limits
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric

_PROBE = "import importlib.util as u, sys; sys.exit(u.find_spec('sentence_transformers') is None)"
_MODEL_ADDRESS_SPACE = 32 << 30


@dataclass(kw_only=True)
class MemoryTask(BfclTask):
    """A question's trial loads what its scenario's prerequisite conversations left in memory.

    The first trial that needs a scenario plays its conversations, each in a session of its own;
    later trials with the same index use the snapshot. See docs/decisions/0018.
    """

    encoder: str = param("", "vector store's encoder: a sentence-transformers folder, or hash")

    # By backend, scenario and trial index.
    _chains: dict[tuple[str, str, int], Chain] = field(default_factory=dict, init=False, repr=False)
    # The session that a sample's trial has open now.
    _speaking: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _busy: defaultdict[str, Any] = field(
        default_factory=lambda: defaultdict(threading.Lock), init=False, repr=False
    )

    def samples(self, limit: int | None, seed: int) -> list[Sample]:  # noqa: ARG002
        """Return the questions, backends in turn, so that every prefix weighs them alike."""
        self._check_encoder()
        rows = self._all_samples()
        columns = [[r for r in rows if r.id.startswith(name)] for name in self.categories]
        mixed = [row for row in joined.from_iterable(zip_longest(*columns)) if row is not None]
        return mixed[:limit]

    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        """Return the texts of the session that the sample's trial has open now."""
        return self._script(self._speaking.get(sample.id, sample.id), agent)

    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        # A script is asked for by sample, so two trials of one sample must not run at a time.
        lock, wait = self._busy[sample.id], context.timeout_s
        if not lock.acquire(timeout=wait):
            raise TimeoutError(f"{sample.id}: another trial of it took more than {wait:g} s")
        try:
            return super().run_trial(sample, context)
        finally:
            lock.release()

    def _play(self, sample: Sample, context: TrialContext) -> Played:
        chain = self._chain(sample, context.trial)

        def talk(conversation: str, asked: TrialContext, snapshot: Any) -> Played:
            self._speaking[sample.id] = conversation
            try:
                told = self._run(conversation, asked, snapshot=snapshot)
            finally:
                del self._speaking[sample.id]
                account = self._call("close_session", self._line(asked))
            return {**told, "account": account}

        played_here = chain.play(context, talk)
        played = self._run(sample.id, context, snapshot=chain.snapshot)
        return {**played, "chain": chain, "conversations": played_here}

    def _outcome(self, played: Played) -> Outcome:
        outcome = super()._outcome(played)
        chain: Chain = played["chain"]
        outcome.metrics.update(chain.metrics(len(played["conversations"])))
        outcome.transcript["snapshot"] = chain.snapshot
        outcome.transcript["prerequisites"] = played["conversations"]
        return outcome

    def _about_trial(self) -> dict[str, Metric]:
        return {**super()._about_trial(), "encoder": self._encoder_name()}

    def provenance(self) -> dict[str, Any]:
        named = {"encoder": self._encoder_name(), "encoder_sha256": self._encoder_sha256()}
        return {**super().provenance(), **named}

    def _chain(self, sample: Sample, trial: int) -> Chain:
        wanted = (backend_of(sample.id), str(sample.cluster))
        key = (*wanted, trial)
        if key not in self._chains:
            told: list[dict[str, Any]] = self._call("conversations")
            ids = [c["id"] for c in told if (backend_of(c["id"]), c["scenario"]) == wanted]
            # Of trials that come here together, all get the chain of one (setdefault is atomic).
            self._chains.setdefault(key, Chain(ids))
        return self._chains[key]

    def _has_model(self) -> bool:
        """Tell whether a vector store is used, and its encoder is a model."""
        return "memory_vector" in self.categories and self.encoder != HASH_ENCODER

    def _encoder_name(self) -> str | None:
        return Path(self.encoder).name if "memory_vector" in self.categories else None

    def _encoder_sha256(self) -> str | None:
        if not self._has_model():
            return None
        found = sorted(Path(self.encoder).rglob("*.safetensors"))
        files = found or sorted(Path(self.encoder).rglob("*.bin"))
        return ",".join(map(file_sha256, files))

    def _worker_config(self) -> dict[str, Any]:
        hashed = self.encoder in ("", HASH_ENCODER)
        return {"encoder": self.encoder if hashed else str(Path(self.encoder).absolute())}

    def _limits(self) -> Limits:
        return Limits(address_space=_MODEL_ADDRESS_SPACE) if self._has_model() else Limits()

    def _check_encoder(self) -> None:
        """Refuse a vector store whose encoder is not chosen, not there or cannot be loaded."""
        if not self._has_model():
            return
        if not self.encoder:
            raise PrerequisiteError(
                f"{self.name} needs the vector store's encoder: --set encoder=DIR with a local "
                "all-MiniLM-L6-v2 folder, or --set encoder=hash for a check that is not comparable"
            )
        if not Path(self.encoder).is_dir():
            raise PrerequisiteError(
                f"encoder={self.encoder} is not a folder; name a local sentence-transformers model"
            )
        probe = subprocess.run((str(python_of("bfcl")), "-I", "-c", _PROBE), check=False)
        if probe.returncode:
            raise PrerequisiteError(
                "encoder=DIR needs sentence-transformers beside bfcl-eval, which the managed "
                "environment leaves out; name a Python that has both in KVBENCH_ENV_BFCL"
            )


class MemoryKv(MemoryTask):
    """`memory_kv`: keys and values."""

    name = "bfcl/memory_kv"
    summary = "BFCL v4 memory, key-value store: 155 questions, 37 conversations"
    categories = ("memory_kv",)


class MemoryVector(MemoryTask):
    """`memory_vector`: texts found by similarity."""

    name = "bfcl/memory_vector"
    summary = "BFCL v4 memory, vector store: 155 questions, 37 conversations"
    categories = ("memory_vector",)


class MemoryRecSum(MemoryTask):
    """`memory_rec_sum`: one text that is rewritten."""

    name = "bfcl/memory_rec_sum"
    summary = "BFCL v4 memory, recursive summary: 155 questions, 37 conversations"
    categories = ("memory_rec_sum",)


class Memory(MemoryTask):
    """The three backends; as each has 155 questions, the mean of all is the unweighted mean."""

    name = "bfcl/memory"
    summary = "BFCL v4 memory: unweighted mean of kv, vector and rec_sum, 465"
    categories = ("memory_kv", "memory_vector", "memory_rec_sum")
