"""LoRA on sessions: cross-entropy on answers to the question, distillation on the rest.

L = L_CE(auxiliary) + lambda L_distill(main) (SideQuest, section 3.3). The base model's distribution
is that of the same network with its adapter switched off and the whole session before it; so no
logits are kept, and the adapter learns to go on as if nothing had left.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from torch.nn import functional

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.training.sidequest.layout import Layout, lay_out
from agentbench_kv.training.sidequest.rows import SideQuestRow

CHECKPOINT = "checkpoint.pt"
LOG = "steps.jsonl"
_SAVE_EVERY_S = 120.0
Progress = Callable[["StepReport"], None]


@dataclass(frozen=True)
class TuneOptions:
    """The paper's settings where it names one."""

    rank: int = 8
    alpha: int = 16
    epochs: int = 3
    lr: float = 2e-4  # falls to zero in a line
    distill: float = 500.0  # lambda
    batch: int = 8  # sessions whose gradients make a step; not in the paper
    seed: int = 0
    dtype: str = "float32"  # of the frozen weights; the adapter's are float32
    device: str = "cpu"


@dataclass(frozen=True)
class StepReport:
    """What a step came to. Losses are means over the sessions that have one; None without any."""

    step: int
    steps: int
    auxiliary: float | None
    distill: float | None  # nats per token, without lambda
    tokens: int
    seconds: float
    peak_mib: int  # of the process, resident, since it began


class Tuner:
    """Trains an adapter for a model; goes on from its checkpoint."""

    def __init__(
        self,
        model: Path,
        rows: Sequence[SideQuestRow],
        data_sha: str,
        options: TuneOptions,
        out: Path,
    ) -> None:
        self.options = options
        self._rows = [row for row in rows if not row.held_out]
        if not any(row.forks for row in self._rows):
            raise UsageError("no session to train on asks for expired cursors; give more runs")
        self._identity = {"data": data_sha, **asdict(options)}
        self._checkpoint, self._log = out / CHECKPOINT, out / LOG
        self.network = _with_adapter(model, options)
        weights = [p for p in self.network.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(weights, lr=options.lr, weight_decay=0.0)
        self.steps = options.epochs * math.ceil(len(self._rows) / options.batch)
        self.step = 0

    @property
    def samples(self) -> dict[str, list[str]]:
        """Sessions that it trains on, by their task."""
        found: dict[str, set[str]] = {}
        for row in self._rows:
            found.setdefault(row.task, set()).add(row.sample)
        return {task: sorted(samples) for task, samples in sorted(found.items())}

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one; UsageError for one of another training."""
        if not self._checkpoint.is_file():
            return
        from peft import set_peft_model_state_dict

        try:
            saved = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
            raise UsageError(
                f"{self._checkpoint} is damaged; remove it, and the training begins anew with the "
                "same data"
            ) from None
        if saved["identity"] != self._identity:
            raise UsageError(
                f"{self._checkpoint} is of a training with other data or options; choose another "
                "--out, or remove it"
            )
        set_peft_model_state_dict(self.network, saved["adapter"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]

    def run(self, progress: Progress, most_steps: int | None = None) -> None:
        """Train to the end, or to `most_steps` in all."""
        last = self.steps if most_steps is None else min(self.steps, most_steps)
        saved_at = time.monotonic()
        _end_last_line(self._log)
        self.network.train()
        try:
            for batch in self._batches(self.step, last):
                report = self._take_step(batch)
                with self._log.open("a") as file:
                    file.write(json.dumps(asdict(report)) + "\n")
                progress(report)
                if time.monotonic() - saved_at > _SAVE_EVERY_S:
                    self._save()
                    saved_at = time.monotonic()
        finally:
            self._save()

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        random.Random(f"{self.options.seed}/{epoch}").shuffle(order)
        return order

    def _batches(self, first: int, last: int) -> Iterator[list[SideQuestRow]]:
        """Yield the batches of steps; each is a function of its number alone."""
        size = self.options.batch
        per_epoch = self.steps // self.options.epochs
        for step in range(first, last):
            epoch, at = divmod(step, per_epoch)
            chosen = self._order(epoch)[at * size : (at + 1) * size]
            yield [self._rows[index] for index in chosen]

    def _take_step(self, batch: Sequence[SideQuestRow]) -> StepReport:
        started = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.lr * (1 - self.step / self.steps)
        losses: tuple[list[float], list[float]] = ([], [])
        for row in batch:
            asked, own = self._losses(row)
            loss = own * self.options.distill
            losses[1].append(own.item())
            if asked is not None:
                loss = loss + asked
                losses[0].append(asked.item())
            (loss / len(batch)).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        tokens = sum(row.tokens for row in batch)
        seconds = time.perf_counter() - started
        answers, distill = (sum(found) / len(found) if found else None for found in losses)
        return StepReport(self.step, self.steps, answers, distill, tokens, seconds, peak)

    def _losses(self, row: SideQuestRow) -> tuple[Tensor | None, Tensor]:
        """Return the means over the tokens of a session's forks' answers, and over its own."""
        length = len(row.ids)
        own = [at - 1 for at, answered in enumerate(row.answered) if answered and at]
        asked: list[int] = []
        wanted: list[int] = []
        begin = length
        for fork in row.forks:
            asked += range(begin + fork.answer - 1, begin + len(fork.ids) - 1)
            wanted += fork.ids[fork.answer :]
            begin += len(fork.ids)
        logits = logits_at(self.network, lay_out(row, row.forks, length), [*own, *asked])
        with torch.no_grad(), self.network.disable_adapter():
            whole = lay_out(structs.replace(row, left=[]), [], length)
            base = logits_at(self.network, whole, own).log_softmax(-1)
        distill = functional.kl_div(
            logits[: len(own)].log_softmax(-1), base, log_target=True, reduction="batchmean"
        )
        if not wanted:
            return None, distill
        target = torch.tensor(wanted, device=logits.device)
        return functional.cross_entropy(logits[len(own) :], target), distill

    def _save(self) -> None:
        from peft import get_peft_model_state_dict

        part = self._checkpoint.with_name(CHECKPOINT + ".part")
        torch.save(
            {
                "identity": self._identity,
                "step": self.step,
                "adapter": get_peft_model_state_dict(self.network),
                "optimizer": self._optimizer.state_dict(),
            },
            part,
        )
        part.replace(self._checkpoint)


def _end_last_line(path: Path) -> None:
    """Have what is appended to a file begin a line, where its last one is torn."""
    if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def logits_at(network: Any, layout: Layout, places: Sequence[int]) -> Tensor:
    """Return float32 logits [places, vocabulary] behind the tokens at `places`."""
    kept = torch.tensor(places, device=network.device)
    found: Tensor = network(**layout.inputs(network), use_cache=False, logits_to_keep=kept).logits
    return found[0].float()


def _with_adapter(model: Path, options: TuneOptions) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PrerequisiteError(
            'training needs peft; install it with: pip install "agentbench-kv[train]"'
        ) from error
    from transformers import AutoModelForCausalLM

    torch.manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    base.to(options.device)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft asks transformers for a name that it is about to drop.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        network = get_peft_model(base, config)
    # An agent's session is long: without it the activations of all layers are kept, for 9,000
    # tokens of a 0.5B model more than 12 GB.
    inner: Any = network.get_base_model()
    if hasattr(inner, "activation_checkpointing_enable"):  # its name from transformers 5.24 on
        inner.activation_checkpointing_enable()
    else:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    return network
