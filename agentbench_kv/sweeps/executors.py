"""Where workers run: processes of this machine, tasks of a Ray cluster, jobs of Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.sweeps.worker import Order

Work = Callable[[dict[str, Any]], None]  # what a worker's process does with `Order.document`
PATIENCE_S = 20.0  # for workers that were told to end
ASK_S = 30.0  # between questions to Slurm about a job
LEAST_MINUTES = 1
DAY_MINUTES = 24 * 60


class StartedWorker(ABC):
    """A worker that was started."""

    @abstractmethod
    def ended(self) -> str | None:
        """Return None while it runs or waits, how it ended (in words, empty: well) after that."""

    @abstractmethod
    def stop(self) -> None:
        """Tell it to end in good order; it may take a while."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""


class SweepExecutor(ABC):
    """Starts workers."""

    name: str
    patience_s = PATIENCE_S

    def room(self, cpus: int, gpus: int) -> bool:  # noqa: ARG002
        """Whether a further worker with these needs may be started now."""
        return True

    @abstractmethod
    def start(self, order: Order) -> StartedWorker:
        """Start a worker, or have it wait for its place."""

    def close(self) -> None:
        """Let go of what the executor holds."""
        return None


class Process(StartedWorker):
    """A worker in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, free: Callable[[], None]):
        self.process = process
        self._log = log
        self._free: Callable[[], None] | None = free

    def ended(self) -> str | None:
        code = self.process.poll()
        if code is None:
            return None
        if self._free is not None:
            if self.process.stdin is not None:
                self.process.stdin.close()
            self._free()
            self._free = None
        return "" if code == 0 else f"exit code {code}; {_last_line(self._log)}"

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class LocalExecutor(SweepExecutor):
    """Processes of this machine, as many as its cores and GPUs have room for."""

    name = "local"

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._gpus = _gpus()
        self._count = len(self._gpus)
        self._used = 0

    def room(self, cpus: int, gpus: int) -> bool:
        if gpus > self._count:
            raise PrerequisiteError(
                f"a run needs {gpus} GPUs and this machine has {self._count}; mend `gpus`, or use "
                "--on ray or --on slurm"
            )
        # What asks for more cores than there are runs alone.
        return gpus <= len(self._gpus) and (not self._used or self._used + cpus <= self._cpus)

    def start(self, order: Order) -> StartedWorker:
        mine = [self._gpus.pop(0) for _ in range(order.gpus)]
        self._used += order.cpus
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{order.worker}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentbench_kv.cli.sweep_worker", _told(order)],
                stdin=subprocess.PIPE,  # its end is how a worker learns that this process is gone
                start_new_session=True,  # Ctrl-C is for this process, which tells the workers
                stdout=file,
                stderr=file,
                env={**os.environ, **_share(order.cpus, mine)},
            )

        def free() -> None:
            self._used -= order.cpus
            self._gpus.extend(mine)

        return Process(process, log, free)


def _told(order: Order) -> str:
    return json.dumps({**order.document(), "follows": True})


def _share(cpus: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment that keeps a worker to its cores and GPUs."""
    return {"OMP_NUM_THREADS": str(cpus), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _gpus() -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [each for each in chosen.split(",") if each.strip() and each.strip() != "-1"]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        return f"{lines[-1][:300]} ({log})" if lines else str(log)
    return str(log)


class RayExecutor(SweepExecutor):
    """Tasks of a Ray cluster: that of RAY_ADDRESS or of this machine, else one begun here."""

    name = "ray"

    def __init__(self, work: Work) -> None:
        try:
            # Ray's own types are none where it is not installed.
            ray: Any = import_module("ray")
        except ImportError as error:
            raise PrerequisiteError(
                "--on ray needs Ray: pip install 'agentbench-kv[ray]'"
            ) from error
        self._ray = ray
        self._work = work
        self._began = not ray.is_initialized()
        if self._began:
            try:
                ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
            except Exception as error:
                raise PrerequisiteError(f"--on ray: {_one_line(error)}") from error

    def start(self, order: Order) -> StartedWorker:
        # A worker that dies is replaced by the sweep, which counts its deaths. Ray sets
        # OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES by what a task asks for.
        needs = {"num_cpus": order.cpus, "num_gpus": order.gpus}
        task = self._ray.remote(**needs, max_retries=0, name=order.worker)(self._work)
        return RayTask(self._ray, task.remote(order.document()))

    def close(self) -> None:
        if self._began:
            self._ray.shutdown()


class RayTask(StartedWorker):
    """A worker in a process of Ray's."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray = ray
        self._reference = reference

    def ended(self) -> str | None:
        ready, _ = self._ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            self._ray.get(self._reference)
        except self._ray.exceptions.RayError as error:
            return _one_line(error)
        return ""

    def stop(self) -> None:
        self._ray.cancel(self._reference)  # raises KeyboardInterrupt there

    def kill(self) -> None:
        self._ray.cancel(self._reference, force=True)


class SlurmExecutor(SweepExecutor):
    """Jobs of Slurm, or of one of submitit's other clusters, through submitit."""

    name = "slurm"
    patience_s = 2 * PATIENCE_S

    def __init__(
        self, work: Work, logs: Path, settings: Mapping[str, str], hours: float | None
    ) -> None:
        try:
            import submitit
        except ImportError as error:
            raise PrerequisiteError(
                "--on slurm needs submitit: pip install 'agentbench-kv[slurm]'"
            ) from error
        chosen = dict(settings)
        self._work = work
        self._cluster = chosen.pop("cluster", "slurm")
        try:
            self._executor = submitit.AutoExecutor(logs.resolve(), cluster=self._cluster)
        except (RuntimeError, ValueError) as error:
            raise PrerequisiteError(
                f"--on slurm: {_one_line(error)}; run it where sbatch is, or on this machine with "
                "--slurm cluster=local"
            ) from error
        minutes = DAY_MINUTES if hours is None else max(LEAST_MINUTES, round(60 * hours) + 1)
        options: dict[str, Any] = {"timeout_min": minutes, **_typed(chosen, self._cluster)}
        try:
            self._executor.update_parameters(name="kvbench", **options)
        except (NameError, TypeError, ValueError) as error:
            raise UsageError(f"--slurm: {_one_line(error)}") from error

    def start(self, order: Order) -> StartedWorker:
        gpus = {"gpus_per_node": order.gpus} if order.gpus else {}
        self._executor.update_parameters(cpus_per_task=order.cpus, **gpus)
        try:
            return SlurmJob(self._executor.submit(self._work, order.document()))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise PrerequisiteError(f"--on slurm: sbatch refused: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _typed(settings: Mapping[str, str], cluster: str) -> dict[str, Any]:
    """Return Slurm's own options as submitit takes them, by the names that sbatch has."""
    typed: dict[str, Any] = {}
    for name, text in settings.items():
        value: Any = int(text) if text.isdecimal() else text
        plain = name.replace("-", "_")
        typed[plain if plain == "timeout_min" else f"{cluster}_{plain}"] = value
    return typed


class SlurmJob(StartedWorker):
    """A worker in a job of submitit's."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self._told = False
        self._asked = time.monotonic()

    def ended(self) -> str | None:
        # submitit asks Slurm about a job that left no result every ten minutes, if not told to.
        force = time.monotonic() - self._asked >= ASK_S
        self._asked = time.monotonic() if force else self._asked
        if not self.job.done(force_check=force):
            return None
        with contextlib.suppress(Exception):
            error = self.job.exception()
            return "" if error is None else _one_line(error)
        return f"job {self.job.job_id} left no result ({self.job.paths.stderr})"

    def stop(self) -> None:
        if not self._told:
            self._told = True
            self.job.cancel(check=False)

    def kill(self) -> None:
        self.stop()


def end_all(handles: Sequence[StartedWorker], patience_s: float) -> None:
    """Tell workers to end, and end those that do not."""
    for handle in handles:
        if handle.ended() is None:
            handle.stop()
    latest = time.monotonic() + patience_s
    while time.monotonic() < latest and any(handle.ended() is None for handle in handles):
        time.sleep(0.1)
    for handle in handles:
        if handle.ended() is None:
            handle.kill()
