"""From runs to a model trained for SideQuest: rows, steps, verdict, folder; each goes on if cut."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.probe.questions import session_of
from agentbench_kv.engines.embedded.model import (
    check_dtype,
    folder_sha,
    model_path,
    pick_device,
)
from agentbench_kv.errors import UsageError
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.results.files import file_sha, json_bytes, write_atomic
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.runs import run_folders
from agentbench_kv.run.recordings import AnswerSource, gold_source, run_source
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.run.traces import TraceCounts, trace_rows
from agentbench_kv.run.trained import joined, trained_on
from agentbench_kv.training.sidequest.annotation import Annotator, by_model, by_rule
from agentbench_kv.training.sidequest.judge import judge
from agentbench_kv.training.sidequest.rows import (
    SideQuestRow,
    count_rows,
    read_rows,
    rows_sha,
    write_rows,
)
from agentbench_kv.training.sidequest.save import losses, save_model, verdict_document
from agentbench_kv.training.sidequest.tune import StepReport, TuneOptions, Tuner

ROWS, DATA_CARD = "data.jsonl", "data.json"
_FULL = ("full", "full-constrained")
_KEPT_LATER = ("model_sha", "tool_syntax", "trials")
_MOST_JUDGED = 20  # sessions held out
Report = Callable[[StepReport | str], None]


@dataclass(frozen=True)
class TrainingRequest:
    """What a user asked to be trained."""

    model: str
    runs: tuple[Path, ...] = ()
    gold: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    tool_syntax: str = "auto"
    limit: int | None = None
    every: int = 4
    annotator: str = ""
    options: TuneOptions = field(default_factory=TuneOptions)
    most_steps: int | None = None


def train_sidequest(request: TrainingRequest, out: Path, report: Report) -> list[str]:
    """Make rows, train, judge and save; return what came of it, a line each.

    UsageError or PrerequisiteError for a request that cannot be met.
    """
    base, options = model_path(request.model), request.options
    check_dtype(options.dtype)
    pick_device(options.device)
    seen = trained_on(request.model)
    rows, card = _data(request, out, report)
    tuner = Tuner(base, rows, card["sha"], request.options, out)
    tuner.resume()
    report(f"{_told(card)}; {tuner.steps} steps, from {tuner.step}")
    asked = _judging(rows)
    codec = TokenCodec(load_tokenizer(base))
    ends = {int(codec.tokenizer.eos_token_id)}

    def judged() -> dict[str, Any]:
        tuner.network.eval()
        return verdict_document(judge(tuner.network, asked, codec.decode, ends))

    tuner.run(report, request.most_steps)
    if tuner.step < tuner.steps:
        return [*_curve(out), f"stopped at step {tuner.step} of {tuner.steps}: {out}"]
    with tuner.network.disable_adapter():
        before = judged()
    verdicts = {"base": before, "trained": judged()}
    folder = save_model(tuner, base, out, card, verdicts, joined(seen, tuner.samples))
    return [*_curve(out), *_verdict_lines(verdicts), str(folder)]


def _data(
    request: TrainingRequest, out: Path, report: Report
) -> tuple[list[SideQuestRow], dict[str, Any]]:
    """Return the rows and their card, made now or by an earlier start of the same request."""
    made_of = _made_of(request)
    path, card_path = out / ROWS, out / DATA_CARD
    if card_path.is_file():
        card = _read_card(card_path)
        _check_made_of(card["made_of"], made_of, out)
        if request.runs and "trials" not in card["made_of"]:
            report(f"{card_path} is from before trials were kept: whether the runs grew is unknown")
        if rows_sha(path) != card["sha"]:
            raise UsageError(f"{path} is not what {DATA_CARD} says; remove both to make them anew")
        return read_rows(path), card
    out.mkdir(parents=True, exist_ok=True)
    counts, rows = TraceCounts(), []
    annotate = _annotator(request.annotator)
    with ExitStack() as stack:
        sources = list(_sources(request, stack))
        number = sum(len(source.samples) for source in sources)
        report(f"playing {number} traces, then again as the method would")
        for row in trace_rows(sources, request.every, annotate, request.options.seed, counts):
            rows.append(row)
            report(f"{len(rows)} of {counts.played} traces played again; {row.sample}")
    if not rows:
        raise UsageError(
            f"of {counts.played} traces {counts.wrong} are wrong and {counts.without_results} hold "
            "no results of tools: SideQuest is trained on right ones with such; give more runs, or "
            "--gold TASK"
        )
    write_rows(path, rows)
    card = {"made_of": made_of, "sha": rows_sha(path), **asdict(counts), **count_rows(rows)}
    write_atomic(card_path, json_bytes(card, indent=1))
    return rows, card


def _check_made_of(kept: Mapping[str, Any], made_of: Mapping[str, Any], out: Path) -> None:
    """Refuse rows that were made of something else, and say in what it differs."""
    # Cards from before these were kept say nothing of weights, tool syntax and trials.
    before = {**{name: made_of[name] for name in _KEPT_LATER}, **kept}
    names = sorted(before.keys() | made_of.keys())
    changed = [name for name in names if before.get(name) != made_of.get(name)]
    if changed:
        raise UsageError(
            f"{out} holds rows of another model, other runs or settings (what changed: "
            f"{', '.join(changed)}); choose another --out"
        )


def _read_card(path: Path) -> dict[str, Any]:
    try:
        card = json.loads(path.read_bytes())
        if isinstance(card["made_of"], dict) and isinstance(card["sha"], str):
            return dict(card)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} is damaged; remove it and {ROWS} beside it to make the rows anew")


def _judging(rows: Sequence[SideQuestRow]) -> list[SideQuestRow]:
    """Return the rows that judge the outcome: of every session that is held out, the first.

    Traces of one session begin alike, and so are asked the same questions.
    """
    first: dict[tuple[str, str], SideQuestRow] = {}
    for row in rows:
        if row.held_out:
            first.setdefault((row.task, session_of(row.sample)), row)
    return list(first.values())[:_MOST_JUDGED]


def _checked(source: AnswerSource) -> AnswerSource:
    if source.task.sends_messages:
        return source
    raise UsageError(
        f"{source.spec.task!r} sent raw completions, and SideQuest is trained on messages; "
        "use --gold TASK --set route=chat, or runs of it with that setting"
    )


def _made_of(request: TrainingRequest) -> dict[str, Any]:
    folders = run_folders(request.runs)
    asked = {
        "runs": [str(folder.resolve().name) for folder in folders],
        "trials": [_trials_sha(folder) for folder in folders],
        "gold": request.gold,
        "settings": dict(request.settings),
        "limit": request.limit,
        "every": request.every,
        "annotator": request.annotator,
        "seed": request.options.seed,
        "model": request.model,
        "model_sha": folder_sha(model_path(request.model)),
        "tool_syntax": request.tool_syntax,
    }
    return asked


def _trials_sha(folder: Path) -> str:
    """Return a hash of what a run gives: its spec, and the first trial of each sample."""
    reader = RunReader(folder)
    digest = hashlib.sha256(json_bytes(reader.info.spec))
    for trial in sorted(reader.trials(), key=lambda trial: trial.key):
        if trial.trial == 0 and trial.transcript is not None:
            path = folder / trial.transcript
            said = file_sha(path) if path.is_file() else None
            digest.update(json_bytes([trial.sample_id, trial.status, said]))
    return digest.hexdigest()


def _sources(request: TrainingRequest, stack: ExitStack) -> Iterator[AnswerSource]:
    if bool(request.runs) == bool(request.gold):
        raise UsageError("name the traces: --runs RUN, or --gold TASK")
    if request.gold:
        asked = (request.gold, request.model, request.limit, request.settings)
        drawn = (request.tool_syntax, request.options.seed)
        yield _checked(stack.enter_context(gold_source(*asked, *drawn)))
    for folder in run_folders(request.runs):
        _check_run(folder, request.model)
        yield _checked(stack.enter_context(run_source(folder, request.limit)))


def _check_run(folder: Path, model: str) -> None:
    try:
        spec = RunSpec.of(RunReader(folder).info.spec)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None
    if spec.model != model:
        raise UsageError(f"{folder} is a run of {spec.model}, not of {model}")
    if spec.method not in _FULL:
        raise UsageError(
            f"{folder} is a run under {spec.method}: main traces are those of a full cache; "
            "kvbench run --method full"
        )


def _annotator(asked: str) -> Annotator:
    if not asked:
        return by_rule
    url, separator, model = asked.rpartition("#")
    if not separator or not url or not model:
        raise UsageError(f"--annotator {asked!r}: expected URL#MODEL")
    return by_model(url, model)


def _told(card: Mapping[str, Any]) -> str:
    repeated = card.get("repeated", 0)  # cards from before it was counted do not say
    left_out = f" ({repeated} repeated ones are left out)" if repeated else ""
    return (
        f"{card['sessions']} right traces of {card['played']}{left_out}, "
        f"{card['questions']} questions about "
        f"{card['open_cursors']} open results, {card['expired_cursors']} of them expired "
        f"({card['told_cursors']} as far as can be told)"
    )


def _curve(out: Path) -> list[str]:
    """Say how the losses fell: the mean over the first and the last tenth of the steps."""
    steps = losses(out)
    part = max(1, len(steps) // 10)
    lines = []
    for name, label in (("auxiliary", "answers"), ("distill", "distillation")):
        first, last = (
            [step[name] for step in some if step[name] is not None]
            for some in (steps[:part], steps[-part:])
        )
        if first and last:
            means = (sum(first) / len(first), sum(last) / len(last))
            lines.append(f"loss of {label}: {means[0]:.4g} at first, {means[1]:.4g} at last")
    seconds = sorted(step["seconds"] for step in steps)
    if steps:
        peak = max(step["peak_mib"] for step in steps)
        lines.append(f"{seconds[len(seconds) // 2]:.1f} s a step (median), {peak} MiB resident")
    return lines


def _verdict_lines(verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for name, found in verdicts.items():
        recall, told, precision = (
            "-" if found[key] is None else f"{found[key]:.1%}"
            for key in ("recall", "told_recall", "precision")
        )
        lines.append(
            f"{name}: of {found['questions']} held-out questions {found['exact']} exact, "
            f"{found['unreadable']} unreadable; expired results named {recall}, of those that can "
            f"be told {told}, rightly {precision}"
        )
    return lines
