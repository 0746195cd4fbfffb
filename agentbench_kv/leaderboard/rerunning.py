"""Playing a random part of a submitted run again, with the model, and comparing token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from agentbench_kv.adapters.base import Sample
from agentbench_kv.errors import UsageError
from agentbench_kv.leaderboard.evidence import CUT_OFF, RunEvidence
from agentbench_kv.leaderboard.identity import (
    find_samples,
    folder_of_model,
    opened,
    unfit,
    unplayable,
)
from agentbench_kv.leaderboard.replay import DERIVED, differing_metric, timeless
from agentbench_kv.leaderboard.submitting import write_stored
from agentbench_kv.results.files import file_sha
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import TrialKey
from agentbench_kv.results.submissions import RERUNS, Rerun, kept_name, reruns
from agentbench_kv.run.calibration import recorded
from agentbench_kv.run.provenance import hardware
from agentbench_kv.run.runner import trial_setup
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.run.trial import Attempt, TrialSetup, play_session, trial_record


def rerun(
    evidence: RunEvidence,
    sample: int,
    seed: int,
    *,
    model: Path | None = None,
    leaderboard: Path | None = None,
) -> Rerun:
    """Play randomly chosen trials of a run again and compare tokens, accounts and scores.

    Another engine version or other hardware may give other tokens where two are about equally
    likely, so a difference is told, not judged. A UsageError or PrerequisiteError if the run cannot
    be played here.

    `seed` chooses `sample` trials, or all if there are fewer; the submitter must not know it in
    advance. `model` is the folder of the run's model, if it is none that ships; the outcome is
    written to the keeper's folder `leaderboard`.
    """
    spec = _runnable(evidence, model)
    known = sorted(evidence.trials)
    chosen = sorted(random.Random(seed).sample(known, min(sample, len(known))))
    compared = _play(evidence, spec, chosen)
    differences = [each.difference for each in compared if each.difference]
    outcome = Rerun(
        run_id=evidence.name,
        records=file_sha(evidence.path / "samples.jsonl"),
        seed=seed,
        played=len(chosen),
        equal=len(chosen) - len(differences),
        accounts=sum(each.account for each in compared),
        scores=sum(each.score for each in compared),
        differs=differences,
        machine=json.dumps(hardware(), sort_keys=True),
    )
    if leaderboard is not None:
        about = outcome.run_id, outcome.records
        number = len(reruns(leaderboard, *about))
        write_stored(leaderboard / RERUNS / f"{kept_name(*about)}-{number:04d}.json", outcome)
    return outcome


def _runnable(evidence: RunEvidence, model: Path | None) -> RunSpec:
    """Return the spec as it is played here; nothing in it may lead this machine elsewhere."""
    spec, name = evidence.spec, evidence.name
    if not evidence.transcripts:
        raise UsageError(f"{name} has no transcripts, so there are no tokens to compare")
    if evidence.at_text_level:
        raise UsageError(f"{name} asked an endpoint; its tokens are not known")
    if spec.engine_args:
        raise UsageError(
            f"{name} passes {', '.join(sorted(spec.engine_args))} to its engine, which is "
            "not done for a submission; run its spec yourself: kvbench run"
        )
    if reason := unplayable(spec) or unfit(spec):
        raise UsageError(f"{name}: {reason}")
    if spec.params.get("encoder", "tokens") not in ("tokens", "hash"):
        raise UsageError(f"{name}: encoder={spec.params['encoder']} is not loaded here")
    folder = folder_of_model(spec, evidence.info.provenance, model)
    if folder is None:
        raise UsageError(
            f"{name} is of model {spec.model}, which is not here (by its hash); "
            "name its folder with --model"
        )
    own = spec.engine == "scripted" or folder != model
    return recorded(spec if own else replace(spec, model=str(folder)))


class _Compared(NamedTuple):  # a trial played again
    difference: str  # where its tokens first differ
    account: bool  # whether it agrees, and the score
    score: bool


def _play(evidence: RunEvidence, spec: RunSpec, chosen: Sequence[TrialKey]) -> list[_Compared]:
    with opened(evidence.spec) as task:
        samples = find_samples(evidence, task)
        if not isinstance(samples, dict):
            raise UsageError(samples.text)
        with trial_setup(spec, task, [samples[key[0]] for key in chosen]) as setup:
            said, found = evidence.info.provenance.get("model_sha"), setup.engine.info.model_sha
            if said != found:
                raise UsageError(f"the model here has hash {found}, the run's is {said}")
            return [_compare(evidence, setup, samples[key[0]], key) for key in chosen]


def _compare(evidence: RunEvidence, setup: TrialSetup, sample: Sample, key: TrialKey) -> _Compared:
    attempt = play_session(setup, sample, key[1])
    said, again = evidence.trials[key], trial_record(sample, attempt, "", 1)
    same_account = all(getattr(said.kv, name) == getattr(again.kv, name) for name in DERIVED)
    difference = _first_difference(evidence, key, attempt)
    if not difference and evidence.keeps_banks and said.status not in CUT_OFF:
        difference = _remembered_otherwise(evidence, key, attempt, again)
    return _Compared(difference, same_account, said.score == again.score)


def _first_difference(evidence: RunEvidence, key: TrialKey, attempt: Attempt) -> str:
    """Say where the tokens first differ, up to the end of a trial that was cut off; or nothing."""
    said = evidence.transcripts[key].tokens
    found = [list(ids) for ids in attempt.report.outputs]
    if evidence.trials[key].status in CUT_OFF:
        found = [ids[: len(cut)] for ids, cut in zip(found, said, strict=False)]
    for turn, (one, other) in enumerate(zip_longest(said, found, fillvalue=())):
        for at, (a, b) in enumerate(zip_longest(one, other)):
            if a != b:
                return f"sample {key[0]} trial {key[1]}: turn {turn}, token {at}"
    return ""


def _remembered_otherwise(
    evidence: RunEvidence, key: TrialKey, attempt: Attempt, again: TrialRecord
) -> str:
    """Say what else came of a trial with a memory whose tokens are the same; or nothing.

    That is what came back of the past, and answers that were given in sessions beside the trial's.
    """
    where = f"sample {key[0]} trial {key[1]}"
    if differs := differing_metric(evidence.trials[key], again):
        return f"{where}: {differs}"
    found = json.loads(json.dumps(attempt.outcome.transcript))
    same = timeless(evidence.transcripts[key].transcript) == timeless(found)
    return "" if same else f"{where}: the transcript"
