"""BFCL v4 memory: questions about conversations that only a memory tool has kept.

Those prerequisite conversations are played once per scenario and trial index, in order.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain as joined
from itertools import zip_longest
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Outcome, Sample, ScriptedAgent, TrialContext
from agentbench_kv.adapters.bfcl.task import BfclTask
from agentbench_kv.adapters.bfcl.worker.memory import HASH_ENCODER, backend_of
from agentbench_kv.adapters.data import file_sha256
from agentbench_kv.adapters.worker import Limits, TrialLimitError, WorkerError
from agentbench_kv.adapters.worker_task import PlayedTrial
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric, TrialStatus

# Plays the conversation of an id in the context's session, from a snapshot of the memory.
Talk = Callable[[str, TrialContext, Any], PlayedTrial]
_PROBE = "import importlib.util as u, sys; sys.exit(u.find_spec('sentence_transformers') is None)"
_MODEL_ADDRESS_SPACE = 32 << 30


@dataclass
class Chain:
    """Conversations of one backend, scenario and trial index, and the memory they leave."""

    conversations: list[str]  # official ids
    snapshot: dict[str, Any] | None = None  # after the last one played, as in the official file
    incomplete: int = 0  # ended early: too many steps, or past the model's last position
    peak_live: int = 0  # most tokens of a session, by the server's account; 0 without one
    _done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def play(self, context: TrialContext, talk: Talk) -> list[dict[str, Any]]:
        """Play what is still missing; return records of what was played here.

        WorkerError if a conversation failed through no fault of the agent; the next trial goes on
        from there. TimeoutError if another trial was busy with it until this one's time was up.
        """
        deadline = time.monotonic() + context.timeout_s
        if not self._lock.acquire(timeout=context.timeout_s):
            raise TimeoutError(f"prerequisite conversations took over {context.timeout_s:g} s")
        try:
            return [self._next(context, talk, deadline) for _ in self.conversations[self._done :]]
        finally:
            self._lock.release()

    def metrics(self, played: int) -> dict[str, Metric]:
        content = json.dumps(self.snapshot, sort_keys=True).encode()
        return {
            "snapshot_sha": hashlib.sha256(content).hexdigest()[:12],
            "prerequisites_played": played,
            "prerequisites_incomplete": self.incomplete,
            "prerequisites_peak_live": self.peak_live,
        }

    def _next(self, context: TrialContext, talk: Talk, deadline: float) -> dict[str, Any]:
        conversation = self.conversations[self._done]
        session, seed = (
            session_of(context.session, self._done),
            seed_of(conversation, context.trial),
        )
        left = max(0.0, deadline - time.monotonic())
        asked = replace(context, session=session, seed=seed, timeout_s=left)
        try:
            told = talk(conversation, asked, self.snapshot)
        except WorkerError as error:
            error.args = (f"{conversation}: {error}",)
            raise
        # As in the official loop: a conversation that broke off in an error saves nothing.
        self.snapshot = told.get("snapshot", self.snapshot)
        self.incomplete += told["status"] != TrialStatus.SCORED
        self.peak_live = max(self.peak_live, int(told["account"].get("peak_live") or 0))
        self._done += 1
        kept = ("status", "text", "steps", "account")
        return {"id": conversation, **{key: told[key] for key in kept}}


def session_of(session: str, number: int) -> str:
    """Name a conversation's session after its trial's; the sample stays the last part."""
    head, mark, sample = session.rpartition("|")
    return f"{head}.memory{number}{mark}{sample}"


def seed_of(conversation: str, trial: int) -> int:
    """Return a sampling seed that depends neither on the method nor on which trial comes first."""
    digest = hashlib.sha256(f"{conversation}:{trial}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


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

    def samples(self, limit: int | None, seed: int) -> list[Sample]:
        """Return the questions, backends in turn, so that every prefix weighs them alike."""
        self._check_encoder()
        rows = super().samples(None, seed)
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

    def _play(self, sample: Sample, context: TrialContext) -> PlayedTrial:
        chain = self._chain(sample, context.trial)

        def talk(conversation: str, asked: TrialContext, snapshot: Any) -> PlayedTrial:
            self._speaking[sample.id] = conversation
            try:
                told = self._run(conversation, asked, snapshot=snapshot)
            except TrialLimitError as error:
                if error.status is not TrialStatus.TIMEOUT:
                    raise
                told = {"status": error.status, "text": str(error), "steps": []}
            finally:
                del self._speaking[sample.id]
                account = self._call("close_session", self._line(asked))
            return {**told, "account": account}

        played_here = chain.play(context, talk)
        played = self._run(sample.id, context, snapshot=chain.snapshot)
        return {**played, "chain": chain, "conversations": played_here}

    def _outcome(self, played: PlayedTrial) -> Outcome:
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


class MemoryAllBackends(MemoryTask):
    """The three backends; as each has 155 questions, the mean of all is the unweighted mean."""

    name = "bfcl/memory"
    summary = "BFCL v4 memory: unweighted mean of kv, vector and rec_sum, 465"
    categories = ("memory_kv", "memory_vector", "memory_rec_sum")
