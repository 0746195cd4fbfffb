"""The training loop and its curriculum: deterministic for a seed, resumable at any step."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name all of torch uses
from torch import Tensor, nn

from agentbench_kv.adapters.micro.generate import CURRICULUM, LONG_CURRICULUM, PROFILES
from agentbench_kv.training.micro.conversation import EVIDENCE, LABELS, PAD
from agentbench_kv.training.micro.data import Mix, RowEncoder, TrainingBatch, batch
from agentbench_kv.training.micro.model import MicroConfig, MicroModel, load_model, save_model
from agentbench_kv.training.micro.tokenizer import build_tokenizer, save_tokenizer

logger = logging.getLogger(__name__)

WARM_UP = 100
"""Steps over which the learning rate rises."""

SHORT, MEDIUM, LONG, LONGER, LONGEST = CURRICULUM
ONE_ITEM, FEW_ITEMS, LONG_TURNS = LONG_CURRICULUM
TASK_1K = PROFILES["recall-1k"]


@dataclass(frozen=True)
class CurriculumStage:
    """A stretch of training."""

    name: str
    mixes: tuple[Mix, ...]  # taken in turn, one per step
    tokens: int  # after which the stage is over
    recall: float = 2.0  # it is over earlier once every kind of code is recalled this well
    rates: tuple[float, float] = (1.0, 1.0)  # learning-rate factors at its first and last token


RECIPE = (
    CurriculumStage("drills", (Mix(160, 14, (SHORT,), drills=1.0),), 4_000_000, recall=0.93),
    CurriculumStage(
        "turns",
        (
            Mix(512, 4, (SHORT,), drills=0.25, auxiliary=0.15),
            Mix(512, 4, (SHORT, MEDIUM), drills=0.25, auxiliary=0.15),
        ),
        1_500_000,
        recall=0.95,
    ),
    CurriculumStage(
        "sessions",
        (Mix(1152, 2, (MEDIUM, TASK_1K), drills=0.1, auxiliary=0.2, gaps=0.4),),
        1_000_000,
        recall=0.96,
    ),
    CurriculumStage(
        "long",
        (
            Mix(1152, 2, (MEDIUM, TASK_1K), drills=0.05, auxiliary=0.2, gaps=0.5),
            Mix(2560, 1, (LONG, LONGER), auxiliary=0.2, gaps=0.3),
        ),
        500_000,
        recall=0.97,
    ),
    CurriculumStage(
        "final",
        (
            Mix(1152, 2, (MEDIUM, TASK_1K), 0.02, 0.2, gaps=0.5, names=5.0, memory=5.0),
            Mix(5632, 1, (LONGEST,), auxiliary=0.1, names=5.0, memory=5.0),
            Mix(512, 4, (SHORT,), auxiliary=0.7, names=5.0, memory=5.0),
            Mix(2560, 1, (LONG, LONGER), auxiliary=0.15, gaps=0.3, names=5.0, memory=5.0),
            Mix(5632, 1, (LONGEST,), auxiliary=0.1, names=5.0, memory=5.0),
        ),
        3_000_000,
        rates=(1.0, 0.0),
    ),
    CurriculumStage(
        "memory",
        (
            Mix(512, 6, (SHORT, MEDIUM), auxiliary=0.85, names=5.0, memory=5.0),
            Mix(5632, 1, (LONGEST,), names=5.0),
            Mix(512, 6, (SHORT, MEDIUM), auxiliary=0.85, names=5.0, memory=5.0),
            Mix(1152, 2, (MEDIUM, TASK_1K), auxiliary=0.5, gaps=0.3, names=5.0, memory=5.0),
        ),
        2_000_000,
        rates=(0.6, 0.0),
    ),
)
"""From dense drills to whole sessions at a falling rate; then once more with more memory turns."""

LONG_RECIPE = (
    CurriculumStage(
        "spell",
        (Mix(1792, 2, (ONE_ITEM,), names=5.0), Mix(1152, 2, (MEDIUM, TASK_1K), drills=0.1)),
        400_000,
        rates=(0.7, 0.7),
    ),
    CurriculumStage(
        "long turns",
        (
            Mix(1792, 2, (ONE_ITEM,), gaps=0.5, names=5.0),
            Mix(3072, 1, (FEW_ITEMS,), gaps=0.3, names=5.0),
            Mix(4608, 1, (LONG_TURNS,), names=5.0),
        ),
        1_200_000,
        rates=(0.7, 0.0),
    ),
)
"""What the weights of `RECIPE` take on to become the model with long turns."""

_DRILL = Mix(448, 8, (SHORT,), memory=5.0, memory_drills=0.95)
_TURNS = Mix(
    *(512, 7, (SHORT, MEDIUM)),
    auxiliary=0.7,
    names=5.0,
    memory=5.0,
    memory_drills=0.2,
    reasoned=True,
)
_SESSIONS = Mix(
    1152, 3, (MEDIUM, TASK_1K), auxiliary=0.6, gaps=0.3, names=5.0, memory=5.0, reasoned=True
)
MEMORY_RECIPE = (
    CurriculumStage(
        "memory drills",
        (_DRILL, _DRILL, _DRILL, Mix(1152, 3, (MEDIUM, TASK_1K), drills=0.1, gaps=0.3, names=5.0)),
        2_500_000,
        rates=(0.5, 0.5),
    ),
    CurriculumStage(
        "memory turns",
        (_TURNS, Mix(5632, 1, (LONGEST,), names=5.0), _TURNS, _SESSIONS),
        4_000_000,
        rates=(0.5, 0.0),
    ),
)
"""What the weights of `RECIPE` take on to answer auxiliary turns as SideQuest teaches them."""


@dataclass(frozen=True)
class TrainingOptions:
    """How to run."""

    out: Path  # folder of the checkpoint, the log and the exported model
    seed: int = 0  # of weights and data
    device: str = "cpu"
    threads: int = 1
    log_every: int = 50  # steps
    save_every: int = 200  # steps


@dataclass
class _Progress:
    """Everything but weights and optimizer state that the next step depends on."""

    stage: int = 0
    step: int = 0
    tokens: int = 0
    stage_tokens: int = 0
    stage_step: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    recall: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Trains one model on the stages of a recipe."""

    def __init__(
        self,
        options: TrainingOptions,
        recipe: Sequence[CurriculumStage],
        config: MicroConfig | None = None,
    ) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.options = options
        self.recipe = recipe
        self.tokenizer = build_tokenizer()
        self.encoder = RowEncoder(self.tokenizer)
        self.model = MicroModel(config or MicroConfig()).to(options.device)
        self.optimizers = Optimizers(self.model)
        self.progress = _Progress()

    @property
    def done(self) -> bool:
        return self.progress.stage >= len(self.recipe)

    def run(self, steps: int | None = None) -> None:
        """Train until the recipe is over, or for a number of steps."""
        last = None if steps is None else self.progress.step + steps
        # One batch ahead: rows are made by a thread while the model computes.
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self._batch, self.progress.step, *self._place())
            while not self.done and self.progress.step != last:
                began = time.perf_counter()
                current, place = ahead.result(), self._place()
                ahead = pool.submit(self._batch, self.progress.step + 1, place[0], place[1] + 1)
                self._step(current)
                self.progress.seconds += time.perf_counter() - began
                self._after_step()
                if not self.done and self._place()[0] != place[0]:
                    ahead = pool.submit(self._batch, self.progress.step, *self._place())

    def _place(self) -> tuple[int, int]:
        return self.progress.stage, self.progress.stage_step

    def _batch(self, step: int, stage: int, stage_step: int) -> TrainingBatch:
        mixes = self.recipe[stage].mixes
        return batch(self.encoder, mixes[stage_step % len(mixes)], self.options.seed, step)

    def _step(self, current: TrainingBatch) -> None:
        device = self.options.device
        ids, positions = current.ids.to(device), current.positions.to(device)
        logits = self.model(ids[:, :-1], positions[:, :-1])
        targets, weights = ids[:, 1:].flatten(), current.weights.to(device).flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step(self._factor())
        self._observe(current, logits.detach(), loss.item())

    def _factor(self) -> float:
        """Learning-rate factor: by tokens, since seconds depend on what else the machine does."""
        stage = self.recipe[self.progress.stage]
        rising = min(1.0, (self.progress.step + 1) / WARM_UP)
        done = min(1.0, self.progress.stage_tokens / stage.tokens)
        first, last = stage.rates
        return rising * (first + (last - first) * done)

    def _observe(self, current: TrainingBatch, logits: Tensor, loss: float) -> None:
        """Update running means; no row comes twice, so training recall is held-out recall."""
        progress = self.progress
        labels, targets = current.labels[:, 1:].flatten(), current.ids[:, 1:].flatten()
        asked = labels.ge(2) & labels.ne(PAD)
        right = (logits.flatten(0, 1)[asked].argmax(-1).cpu() == targets[asked]).float()
        for label in sorted(set(labels[asked].tolist())):
            seen = right[labels[asked] == label]
            keep = 0.998 ** len(seen)
            old = progress.recall.get(LABELS[label], 0.0)
            progress.recall[LABELS[label]] = keep * old + (1 - keep) * float(seen.mean())
        progress.loss = loss if not progress.step else 0.98 * progress.loss + 0.02 * loss
        progress.step += 1
        progress.stage_step += 1
        progress.tokens += current.tokens
        progress.stage_tokens += current.tokens

    def _after_step(self) -> None:
        progress, stage = self.progress, self.recipe[self.progress.stage]
        if stage.name == "drills":
            # They do not have every kind of code.
            worst = min((r for name, r in progress.recall.items() if "/" in name), default=0.0)
        else:
            worst = min(progress.recall.get(LABELS[label], 0.0) for label in EVIDENCE)
        over = progress.stage_tokens >= stage.tokens
        if over or (worst >= stage.recall and progress.stage_step >= 50):
            self._log(event=f"{stage.name} done")
            progress.stage += 1
            progress.stage_step = progress.stage_tokens = 0
            progress.recall.clear()
            self.save()
        elif progress.step % self.options.log_every == 0:
            self._log()
        if progress.step % self.options.save_every == 0:
            self.save()

    def _log(self, event: str = "") -> None:
        progress = self.progress
        recall = {name: round(value, 4) for name, value in sorted(progress.recall.items())}
        entry = {
            "stage": self.recipe[progress.stage].name,
            "step": progress.step,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 1),
            "loss": round(progress.loss, 4),
            "recall": recall,
            **({"event": event} if event else {}),
        }
        self.options.out.mkdir(parents=True, exist_ok=True)
        with (self.options.out / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        logger.info("%s", json.dumps(entry))

    def save(self) -> None:
        """Write the checkpoint and export the model as it is."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state(),
            "progress": asdict(self.progress),
        }
        partial = self.options.out / "state.partial"
        torch.save(state, partial)
        partial.replace(self.options.out / "state.pt")
        folder = self.options.out / "model"
        save_model(self.model, folder, self.encoder.end, self.encoder.pad)
        save_tokenizer(self.tokenizer, folder)

    def start_from(self, folder: Path) -> None:
        """Take the weights of an exported model; optimizers and progress start anew."""
        self.model.load_state_dict(load_model(folder).state_dict())

    def resume(self) -> None:
        """Go on from the checkpoint in the output folder."""
        path = self.options.out / "state.pt"
        state = torch.load(path, map_location=self.options.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizers.restore(state["optimizers"])
        self.progress = _Progress(**state["progress"])


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, so that all directions of a matrix learn alike.

    For matrices only; Nesterov momentum, decoupled decay. See
    https://kellerjordan.github.io/posts/muon/
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update the matrices, those of a shape together."""
        for group in self.param_groups:
            shapes = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes[weight.shape].append(weight)
            for weights in shapes.values():
                self._update(weights, group)

    def _update(self, weights: list[nn.Parameter], group: dict[str, float]) -> None:
        nudges = [self._nudge(weight, group["momentum"]) for weight in weights]
        rows, columns = weights[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for weight, update in zip(weights, _orthogonal(torch.stack(nudges)), strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _nudge(self, weight: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        gradient = weight.grad
        if gradient is None:
            raise RuntimeError("a weight without a gradient reached the update")
        state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum"], momentum)


def _orthogonal(stack: Tensor) -> Tensor:
    """Bring all singular values near one by five Newton-Schulz steps; (matrices, rows, columns)."""
    tall = stack.shape[-2] > stack.shape[-1]
    x: Tensor = stack.mT if tall else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x


class Optimizers:
    """Both optimizers behind one learning-rate factor."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        embeddings = [p for name, p in named if p.dim() == 2 and "embed" in name]
        gains = [p for _, p in named if p.dim() < 2]
        groups = [{"params": embeddings, "lr": 3e-3}, {"params": gains, "lr": 1e-2}]
        adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self.parts: tuple[torch.optim.Optimizer, ...] = (Muon(matrices), adam)
        self._rates = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, factor: float) -> None:
        """Update the weights at `factor` times the learning rates, and drop the gradients."""
        for part, rates in zip(self.parts, self._rates, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, object]]:
        """Return what a resumed run needs."""
        return [part.state_dict() for part in self.parts]

    def restore(self, state: list[dict[str, object]]) -> None:
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)
