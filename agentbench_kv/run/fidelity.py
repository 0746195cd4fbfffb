"""Playing recorded sessions under many methods at once, and a run's records of what came out.

Every (method, budget) is a run like any other, on the embedded engine: a sample is a session, its
score the share of tokens on which both caches have the same best (`top1`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from agentbench_kv.analysis.fidelity import FidelityCounts, TokenLog, compare, distance_group
from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import EngineOptions, KVStats
from agentbench_kv.engines.embedded.beginnings import Beginnings
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.forced import ForcedPlay, Stretch
from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.errors import ContextLimitError, UsageError, unknown_name
from agentbench_kv.methods.base import PHASE_NAMES, Method, Phase
from agentbench_kv.phases import PhaseTable, load_tokenizer, system_tokens
from agentbench_kv.registry import load_method, make_method, split_settings
from agentbench_kv.results.fidelity import PREFIX
from agentbench_kv.results.records import KVAccount, Metric, TrialRecord, TrialStatus, Usage
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunDir, RunStore
from agentbench_kv.results.summary import GIVEN_TOKENS, Summary, summarize
from agentbench_kv.run.calibration import calibration_used, identified
from agentbench_kv.run.provenance import environment, method_code, refuse_other_model
from agentbench_kv.run.recordings import RecordedTurn, Recording, refuse_other_labels
from agentbench_kv.run.runner import refuse_without_messages
from agentbench_kv.run.spec import RunSpec

GOLD = "/gold"  # behind a task: its golden sessions
Progress = Callable[[str, int, int], None]  # session, sessions done, sessions in all


@dataclass(frozen=True)
class FidelityArm:
    """One method at one budget, with its settings."""

    method: str
    budget: Budget | None
    settings: Mapping[str, str]
    kv_dtype: str = ""

    def spec(
        self, model: str, source: str, dtype: str, device: str, like: RunSpec | None = None
    ) -> RunSpec:
        """Return the arm's run on some sessions; `like` is the run that they are from, if any.

        It names what the method is calibrated on: that run's own if it has the same method, else
        what its user calibrated the model on, else the text of the sessions' task.
        """
        built = make_method(self.method, self.budget, self.settings)
        if built.spans or built.offline:
            raise UsageError(f"method {built.label!r} ranks no rows of a live cache; leave it out")
        refuse_other_labels(built.closing_markers)
        spec = RunSpec(
            "embedded", model, built.label, self.budget if built.compresses else None,
            PREFIX + source, params=built.settings(), dtype=dtype, device=device,
            max_tokens=1, concurrency=1, kv_dtype=self.kv_dtype,
        )  # fmt: skip
        EmbeddedEngine.check_kv_dtype(EngineOptions(model, built, kv_dtype=self.kv_dtype))
        task = source.removesuffix(GOLD)
        if like is not None:
            task = like.task
            if like.method == spec.method:
                spec = replace(spec, calibration=like.calibration)
        vars(spec)["built_method"] = built
        return identified(spec, task=task)


def fidelity_arms(
    methods: Sequence[str],
    budgets: Sequence[Budget],
    settings: Mapping[str, str],
    kv_dtypes: Sequence[str] = ("",),
) -> list[FidelityArm]:
    """Return every method at every budget and precision, each with those settings that it has.

    A method may bring settings of its own, as in `agentkv,pool=max,chunk=4`. UsageError for a
    setting that none of them has, and for a method without its budget.
    """
    known = [split_settings(text) for text in dict.fromkeys(methods)]
    classes = [load_method(name.partition("@")[0]) for name, _ in known]
    for key in settings:
        if not any(key in cls.parameters() for cls in classes):
            raise unknown_name("parameter", key, classes[0].parameters())
    arms = []
    for (name, more), cls in zip(known, classes, strict=True):
        own = {key: value for key, value in settings.items() if key in cls.parameters()} | more
        if cls.compresses and not budgets:
            raise UsageError(f"{name} needs a budget: add --budget TOKENS")
        sizes: Sequence[Budget | None] = budgets if cls.compresses else [None]
        arms += [FidelityArm(name, size, own, kv) for size in sizes for kv in kv_dtypes]
    return arms


def one_run(folder: Path) -> Path:
    """Return the run directory that a folder is, or that it holds beside fidelity's own.

    A UsageError naming some, if there are more.
    """
    store = RunStore(folder)
    if (folder / "run.json").is_file():
        return folder
    played = [name for name in store.names() if not _is_fidelity(store.find(name))]
    if len(played) > 1:
        shown = ", ".join(played[:3]) + ", ..." * (len(played) > 3)
        raise UsageError(f"{folder} holds {len(played)} runs, name one: {shown}")
    return folder / played[0] if played else folder


def _is_fidelity(run: RunReader) -> bool:
    return str(run.info.spec.get("task", "")).startswith(PREFIX)


def play_fidelity(
    specs: Sequence[RunSpec],
    recordings: Sequence[Recording],
    out: Path,
    provenance: Mapping[str, Any],
    progress: Progress = lambda *_: None,
    save_tokens: bool = False,
    by_token: bool = False,
) -> list[Summary]:
    """Play what is missing of every spec and summarize them; the specs differ by method only.

    `save_tokens` keeps every token's figures of the sessions played now, as transcripts; `by_token`
    feeds answers as a decode does, for bits that are those of a run in less than float32.
    """
    first = specs[0]
    model = load_model(first.model, first.dtype, first.device)
    runs: list[RunReader] = []
    arms: list[tuple[RunDir, Method]] = []
    with ExitStack() as stack:
        built = [spec.built_method for spec in specs]
        beginnings = stack.enter_context(closing(Beginnings(model, built)))
        for spec in specs:
            run = _opened(spec, recordings, RunStore(out), model)
            runs.append(run)
            if isinstance(run, RunDir):
                arms.append((stack.enter_context(run), spec.built_method))
                run.annotate(_provenance(model, spec, provenance))
            _check_sessions(run, recordings)
        for done, recording in enumerate(recordings):
            missing = [
                (run, method)
                for run, method in arms
                if (recording.sample, 0) not in run.finished_trials()
            ]
            if missing:
                progress(recording.sample, done, len(recordings))
                with ExitStack() as playing:
                    for arm, _ in missing:
                        playing.enter_context(arm.playing())
                    _play(model, recording, missing, beginnings, save_tokens, by_token)
        return [summarize(run) for run in runs]


def _opened(
    spec: RunSpec, recordings: Sequence[Recording], store: RunStore, model: LoadedModel
) -> RunReader:
    """Return a spec's run, open for writing if it misses a session."""
    if spec.id in store.names():
        refuse_other_model(store.find(spec.id), model.sha)
    made = environment(spec.device) | method_code(spec.built_method)
    keys = [(recording.sample, 0) for recording in recordings]
    whole = store.whole(spec.id, spec.document(), made, keys)
    return whole or store.open(spec.id, spec.document(), made, len(recordings))


def _check_sessions(run: RunReader, recordings: Sequence[Recording]) -> None:
    """Refuse to go on with a run of other sessions: arms are compared token by token.

    More of the same, or the first of them, are the same sessions.
    """
    known = {recording.sample: recording.sha for recording in recordings}
    clusters = {recording.sample: recording.cluster for recording in recordings}
    played = list(dict.fromkeys(record.sample_id for record in run.trials()))
    shared = min(len(played), len(known))
    if set(played[:shared]) != set(list(known)[:shared]):
        others = [name for name in played if name not in known] or played
        raise UsageError(
            f"run {run.info.run_id} holds sessions of something else ({', '.join(others[:3])}); "
            "choose another --out"
        )
    for record in run.trials():
        if record.sample_id in known and record.prompt_sha != known[record.sample_id]:
            raise UsageError(
                f"run {run.info.run_id} holds another session {record.sample_id!r} (other task "
                "settings, tool syntax, template or data); choose another --out"
            )
        if record.sample_id in known and record.cluster != clusters[record.sample_id]:
            raise UsageError(
                f"run {run.info.run_id} holds session {record.sample_id!r} in cluster "
                f"{record.cluster!r}, and now it is {clusters[record.sample_id]!r}; choose another "
                "--out"
            )


def _play(
    model: LoadedModel,
    recording: Recording,
    arms: Sequence[tuple[RunDir, Method]],
    beginnings: Beginnings,
    save_tokens: bool,
    by_token: bool,
) -> None:
    tallies = [_Tally() for _ in arms]
    started = time.perf_counter()
    methods = [method for _, method in arms]
    system, opens = _opening(model, recording, methods)
    precisions = [str(run.info.spec.get("kv_dtype") or "") for run, _ in arms]
    play = ForcedPlay(
        model, methods, system, by_token=by_token, kv_dtypes=precisions, beginnings=beginnings
    )
    spent = 0.0
    error = None
    try:
        for number, turn in enumerate(recording.turns):
            for stretch in play.turn(turn.prompt, turn.answer):
                began = time.perf_counter()
                _count(stretch, turn, number, play.stats(), tallies)
                spent += time.perf_counter() - began
            for each in tallies:
                each.counts.end_call()
    except ContextLimitError as found:
        error = str(found)
    finally:
        stats = play.stats()
        play.close()
    seconds = time.perf_counter() - started
    shared = {"seconds": seconds / len(arms), "figures_s": spent / len(arms), "system_sha": opens}
    for (run, _), own, account in zip(arms, tallies, stats, strict=True):
        saved = None
        if save_tokens:
            saved = run.save_transcript(recording.sample, 0, own.document(account))
        record = _record(recording, own.counts, account, shared, error)
        run.append_trial(structs.replace(record, transcript=saved))


@dataclass
class _Tally:
    """What an arm's session has come to so far."""

    counts: FidelityCounts = field(default_factory=FidelityCounts)
    log: TokenLog = field(default_factory=TokenLog)

    def document(self, account: KVStats) -> dict[str, Any]:
        """Return every token's figures; an event as (first answered token after it, held, kept)."""
        events = [(event.decoded, event.live_before, event.live_after) for event in account.events]
        return {"fidelity": {**self.log.columns, "events": events}}


def _opening(
    model: LoadedModel, recording: Recording, methods: Sequence[Method]
) -> tuple[int, str | None]:
    """Return the length of a session's system message and its hash, if it has one that is known."""
    table = PhaseTable.for_tokenizer(load_tokenizer(model.path))
    if any(method.protect == "system" for method in methods):
        refuse_without_messages(table.family.name)
    ids = [token for token, _ in recording.turns[0].prompt]
    count = system_tokens(table, ids)
    text = ",".join(map(str, ids[:count]))
    return count, hashlib.sha256(text.encode()).hexdigest() if count else None


def _count(
    stretch: Stretch,
    turn: RecordedTurn,
    number: int,
    stats: Sequence[KVStats],
    tallies: Sequence[_Tally],
) -> None:
    part = slice(stretch.first, stretch.first + len(stretch.full))
    labels = turn.answer[part]
    tokens = torch.tensor([token for token, _ in labels], device=stretch.full.device)
    in_call = [phase is Phase.ACT for _, phase in labels]
    common = [
        (f"_{PHASE_NAMES[phase]}", f"_{kind}", f"_turn{min(number, 9)}")
        for (_, phase), kind in zip(labels, turn.kinds[part], strict=True)
    ]
    columns: dict[str, list[Any]] = {
        "token": [token for token, _ in labels],
        "phase": [PHASE_NAMES[phase] for _, phase in labels],
        "kind": list(turn.kinds[part]),
        "turn": [number] * len(labels),
    }
    for logits, account, own in zip(stretch.of_methods, stats, tallies, strict=True):
        since = _since(account, len(common))
        groups = [
            (*names, distance_group(None if since is None else since + at + 1))
            for at, names in enumerate(common)
        ]
        figures = compare(stretch.full, logits, tokens)
        own.counts.add(figures, groups, in_call)
        own.log.add(figures, columns)


def _since(account: KVStats, rows: int) -> int | None:
    """Return the tokens drawn from the last event to a stretch of so many rows, fed just now.

    The stretch's own tokens count as drawn by now, but for the last one, which it predicts.
    """
    if not account.events:
        return None
    return account.decode_tokens - (rows - 1) - account.events[-1].decoded


def _record(
    recording: Recording,
    counts: FidelityCounts,
    account: KVStats,
    shared: Mapping[str, Metric],
    error: str | None,
) -> TrialRecord:
    same, asked = counts.sums["top1"]
    scored = error is None and asked > 0
    return TrialRecord(
        sample_id=recording.sample,
        trial=0,
        seed=0,
        status=TrialStatus.SCORED if scored else TrialStatus.CONTEXT_LIMIT,
        score=same / asked if scored else None,
        metrics={**counts.metrics(), **shared} if scored else {},
        kv=KVAccount(**account.recorded()),
        usage=Usage(),
        prompt_sha=recording.sha,
        error=error,
        cluster=recording.cluster,
    )


def _provenance(model: LoadedModel, spec: RunSpec, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "engine": "embedded",
        "model_sha": model.sha,
        "device": model.shape.device.type,
        "dtype": str(model.shape.dtype).removeprefix("torch."),
        "context_limit": model.context_limit,
        **(
            {"engine_details": {"kv_dtype": f"{spec.kv_dtype}, simulated"}} if spec.kv_dtype else {}
        ),
        "changed_settings": spec.built_method.changed_settings(),
        "determinism": GIVEN_TOKENS,
        **calibration_used(spec.built_method),
        **more,
    }
