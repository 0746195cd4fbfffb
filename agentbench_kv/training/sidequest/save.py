"""The trained model as a folder that every engine loads, with its cards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentbench_kv.methods.dropping.sidequest import TRAINED, TRIGGER
from agentbench_kv.results.files import json_bytes, write_atomic
from agentbench_kv.training.sidequest.judge import CursorVerdict
from agentbench_kv.training.sidequest.tune import LOG, Tuner

_CARD = """# {base}, trained for SideQuest

LoRA (rank {rank}, alpha {alpha}, all linear layers), {epochs} epochs, learning rate {lr}, lambda
{distill:g}, {batch} sessions a step, seed {seed}; {steps} steps. Data: {data}.

To the message `{trigger}` it answers with the tool results that are expired, as
`{{"del_cursors": [...]}}`. `kvbench run --model {folder} --method sidequest` plays it.

On {questions} questions of sessions that it was not trained on (greedy): {exact} answers exact,
{unreadable} unreadable, precision {precision}, recall {recall} ({told} of what can be told).
Before training: {before}.
"""


def save_model(
    tuner: Tuner,
    base: Path,
    out: Path,
    data: Mapping[str, Any],
    verdicts: Mapping[str, Any],
    trained_on: Mapping[str, Sequence[str]],
) -> Path:
    """Write the adapter and the merged model with its cards; return the merged model's folder.

    `trained_on` are all samples that the model has seen, by task, its base's included.
    """
    adapter, merged = out / "adapter", out / "model"
    tuner.network.save_pretrained(adapter)
    network = tuner.network.merge_and_unload()
    network.save_pretrained(merged)
    for file in base.iterdir():
        if file.is_file() and not (merged / file.name).exists() and _of_tokenizer(file.name):
            shutil.copyfile(file, merged / file.name)
    mark = {
        "trigger": TRIGGER,
        "base": str(base.name),
        "options": asdict(tuner.options),
        "steps": tuner.step,
        "data": dict(data),
        "held_out": dict(verdicts),
        "trained_on": dict(trained_on),
        "samples": sorted({sample for found in trained_on.values() for sample in found}),
    }
    for folder in (adapter, merged):
        write_atomic(folder / TRAINED, json_bytes(mark, indent=1))
    write_atomic(merged / "README.md", _card(tuner, base, merged, data, verdicts).encode())
    return merged


def verdict_document(found: CursorVerdict) -> dict[str, Any]:
    shares = {"recall": found.recall, "precision": found.precision}
    return {**asdict(found), **shares, "told_recall": found.told_recall}


def losses(out: Path) -> list[dict[str, Any]]:
    """Return the steps that were logged, one report each, a repeated step once."""
    lines = (out / LOG).read_text().splitlines() if (out / LOG).is_file() else []
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        with suppress(ValueError):  # a line that was torn; its step was taken again
            report = json.loads(line)
            by_step[report["step"]] = report
    return [by_step[step] for step in sorted(by_step)]


def _of_tokenizer(name: str) -> bool:
    wanted = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template")
    return name.startswith(wanted)


def _card(
    tuner: Tuner, base: Path, folder: Path, data: Mapping[str, Any], verdicts: Mapping[str, Any]
) -> str:
    after, before = verdicts["trained"], verdicts["base"]
    return _CARD.format(
        **asdict(tuner.options),
        base=base.name,
        steps=tuner.step,
        data=f"{data['sessions']} traces, {data['questions']} questions ({data['sha'][:12]})",
        trigger=TRIGGER,
        folder=folder.name,
        questions=after["questions"],
        exact=after["exact"],
        recall=_share(after["recall"]),
        told=_share(after["told_recall"]),
        precision=_share(after["precision"]),
        unreadable=after["unreadable"],
        before=f"recall {_share(before['recall'])}, precision {_share(before['precision'])}",
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
