"""Forged submissions, each with mended hashes and summary: refused, or labelled for what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.leaderboard import validate
from agentbench_kv.results.run_names import transcript_name
from agentbench_kv.results.submissions import Label
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

Forgery = Callable[[Any, dict[str, Path]], None]


def right(row: dict[str, Any]) -> None:
    """Make a record one of full success."""
    for name in [name for name in row["metrics"] if name.endswith("_asked")]:
        row["metrics"][name.replace("_asked", "_right")] = row["metrics"][name]
    row["score"] = 1.0


def all_scores_one(f: Any, _: Any) -> None:
    f.trials(lambda row: row.update(score=1.0))


def all_scores_and_parts_one(f: Any, _: Any) -> None:
    f.trials(right)


def failing_trials_deleted(f: Any, _: Any) -> None:
    rows = f.lines("samples.jsonl")
    kept = [row for row in rows if row["score"] == 1]
    assert 0 < len(kept) < len(rows)
    drop_trials(f, kept)


def failing_trials_deleted_and_limit_lowered(f: Any, _: Any) -> None:
    failing_trials_deleted(f, _)
    count = len(f.lines("samples.jsonl"))
    f.info(lambda info: info["spec"].update(limit=count))
    f.cover(rename=True)


def drop_trials(f: Any, kept: list[dict[str, Any]]) -> None:
    ids = {row["sample_id"] for row in kept}
    f.write("samples.jsonl", kept)
    f.write("turns.jsonl", [row for row in f.lines("turns.jsonl") if row["sample_id"] in ids])
    stay = {row["transcript"] for row in kept}
    for path in (f.run / "transcripts").iterdir():
        if f"transcripts/{path.name}" not in stay:
            path.unlink()
    f.info(lambda info: info.update(expected_trials=len(kept)))


def passing_record_copied(f: Any, _: Any, *, seeds: bool = False) -> None:
    rows = f.lines("samples.jsonl")
    good = next(row for row in rows if row["score"] == 1)
    turns = [row for row in f.lines("turns.jsonl") if row["sample_id"] == good["sample_id"]]
    spec = RunSpec(**json.loads((f.run / "run.json").read_text())["spec"])
    forged, all_turns = [], []
    for row in rows:
        name = row["sample_id"]
        own = {"sample_id": name, "transcript": transcript_name(name, 0)}
        seed = spec.trial_seed(name, 0) if seeds else good["seed"]
        forged.append({**good, **own, "seed": seed})
        all_turns += [{**turn, "sample_id": name} for turn in turns]
        if name != good["sample_id"]:
            shutil.copyfile(f.run / good["transcript"], f.run / own["transcript"])
    f.write("samples.jsonl", forged)
    f.write("turns.jsonl", all_turns)


def passing_record_copied_with_seeds(f: Any, _: Any) -> None:
    passing_record_copied(f, _, seeds=True)


def later_record_supersedes(f: Any, _: Any) -> None:
    rows = f.lines("samples.jsonl")
    better = json.loads(json.dumps([row for row in rows if row["score"] == 0]))
    for row in better:
        right(row)
    f.write("samples.jsonl", rows + better)


def surplus_trials(f: Any, _: Any) -> None:
    rows = f.lines("samples.jsonl")
    name = rows[0]["sample_id"]
    again = {"trial": 1, "transcript": transcript_name(name, 1)}
    shutil.copyfile(f.run / rows[0]["transcript"], f.run / again["transcript"])
    f.write("samples.jsonl", [*rows, {**rows[0], **again}])
    turns = f.lines("turns.jsonl")
    more = [{**turn, "trial": 1} for turn in turns if turn["sample_id"] == name]
    f.write("turns.jsonl", turns + more)
    f.info(lambda info: info.update(expected_trials=len(rows) + 1))


def provenance_emptied(f: Any, _: Any) -> None:
    f.info(lambda info: info.update(provenance={}))


def data_hash_swapped(f: Any, _: Any) -> None:
    f.info(lambda info: info["provenance"]["task"].update(episodes_sha="0" * 64))


def model_hash_swapped(f: Any, _: Any) -> None:
    f.info(lambda info: info["provenance"].update(model_sha="0" * 64))


def peak_lowered(f: Any, _: Any) -> None:
    f.trials(lambda row: row["kv"].update(peak_live=int(row["kv"]["peak_live"] * 0.3)))


def peak_bytes_lowered(f: Any, _: Any) -> None:
    """Take less memory than the tokens that are held; all sessions by as much."""
    f.trials(lambda row: row["kv"].update(peak_bytes=row["kv"]["peak_bytes"] // 2))


def every_live_count_lowered(f: Any, _: Any) -> None:
    """Lower what every file says was held, so that all of it agrees."""

    def lower(row: dict[str, Any], names: tuple[str, ...]) -> None:
        row.update({name: int(row[name] * 0.9) for name in names})

    f.trials(lambda row: lower(row["kv"], ("peak_live", "bytes_read")))
    f.trials(lambda row: row["kv"].update(mean_decode_kv=row["kv"]["mean_decode_kv"] * 0.9))
    f.turns(lambda row: lower(row, ("live_before", "live_after", "kv_bytes_read")))
    f.transcripts(lambda doc: [lower(e, ("live_before", "live_after")) for e in doc["events"]])


def peak_one_of_a_billion(f: Any, _: Any) -> None:
    f.trials(lambda row: row["kv"].update(peak_live=1, logical=10**9))


def smaller_budget_with_an_invented_prefill(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(budget=64))
    f.trials(lambda row: row["kv"].update(budget=64, longest_prefill=5000))
    f.cover(rename=True)


def smaller_budget_everywhere(f: Any, _: Any) -> None:
    """Claim 64 where 384 were kept; the bound is met with an invented prefill in every file."""
    f.info(lambda info: info["spec"].update(budget=64))
    f.trials(lambda row: row["kv"].update(budget=64, longest_prefill=row["kv"]["peak_live"]))
    f.turns(lambda row: row.update(prefill_tokens=max(row["prefill_tokens"], 700)))
    f.cover(rename=True)


def fulls_answers_as_agentkv(f: Any, honest: dict[str, Path]) -> None:
    agentkv = json.loads((honest["agentkv"] / "run.json").read_text())
    spec, changed = agentkv["spec"], agentkv["provenance"]["changed_settings"]
    name = f.run.name
    shutil.rmtree(f.run)
    shutil.copytree(honest["full"], f.run)
    for extra in (".lock", "engine.log"):
        (f.run / extra).unlink(missing_ok=True)
    f.info(lambda info: info.update(spec=spec, run_id=name))
    f.info(lambda info: info["provenance"].update(changed_settings=changed))
    f.cover(rename=True)


def renamed_to_another_method(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(method="agentkv"))
    f.cover(rename=True)


def turns_emptied(f: Any, _: Any) -> None:
    f.write("turns.jsonl", [])


def turns_removed(f: Any, _: Any) -> None:
    (f.run / "turns.jsonl").unlink()


def turns_of_another_method(f: Any, honest: dict[str, Path]) -> None:
    shutil.copyfile(honest["agentkv"] / "turns.jsonl", f.run / "turns.jsonl")


def transcripts_emptied(f: Any, _: Any) -> None:
    f.transcripts(lambda document: document.update(transcript=[], generated=[], events=[]))


def transcripts_without_a_conversation(f: Any, _: Any) -> None:
    f.transcripts(lambda document: document.update(transcript=[]))


def words_of_a_transcript_edited(f: Any, _: Any) -> None:
    def edit(document: dict[str, Any]) -> None:
        said = [each for each in document["transcript"] if each["role"] == "assistant"]
        said[-1]["content"] = "Done, as you wished."

    f.transcripts(edit)


def seed_changed(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(seed=1))
    f.cover(rename=True)


def seed_changed_in_the_records_only(f: Any, _: Any) -> None:
    f.trials(lambda row: row.update(seed=row["seed"] + 1))


def prompt_hashes_invented(f: Any, _: Any) -> None:
    f.trials(lambda row: row.update(prompt_sha="ab" * 32))


def prompt_hashes_removed(f: Any, _: Any) -> None:
    f.trials(lambda row: row.update(prompt_sha=None))


def unknown_task(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(task="micro/recall-9k"))
    f.cover(rename=True)


def unknown_model(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(model="huge-900b"))
    f.cover(rename=True)


def unknown_sample_ids(f: Any, _: Any) -> None:
    spec = RunSpec(**json.loads((f.run / "run.json").read_text())["spec"])

    def other(row: dict[str, Any]) -> None:
        row["sample_id"] = row["sample_id"].replace("-1k-", "-1k-77")

    def trial(row: dict[str, Any]) -> None:
        before = row["transcript"]
        other(row)
        row["seed"] = spec.trial_seed(row["sample_id"], 0)
        row["transcript"] = transcript_name(row["sample_id"], 0)
        (f.run / before).rename(f.run / row["transcript"])

    f.trials(trial)
    f.turns(other)


def more_right_than_asked(f: Any, _: Any) -> None:
    f.trials(lambda row: row["metrics"].update(act_right=3 * row["metrics"]["act_asked"]))


def ten_times_the_speed(f: Any, _: Any) -> None:
    f.info(lambda info: info.update(wall_s=info["wall_s"] / 10))


def ten_times_the_speed_of_turns(f: Any, _: Any) -> None:
    f.trials(lambda row: row["timing"].update(tpot_ms=row["timing"]["tpot_ms"] / 10))


def no_time_at_all(f: Any, _: Any) -> None:
    def instantly(row: dict[str, Any]) -> None:
        row["timing"] = {"ttft_ms": 0.0, "tpot_ms": 0.0, "e2e_s": 0.0}

    f.info(lambda info: info.update(wall_s=1e-6))
    f.trials(instantly)
    f.turns(lambda row: row.update(ttft_ms=0.0, tpot_ms=0.0))


def one_lucky_sample(f: Any, _: Any) -> None:
    rows = f.lines("samples.jsonl")
    drop_trials(f, [row for row in rows if row["score"] == 1][-1:])


def one_lucky_sample_as_a_run_of_one(f: Any, _: Any) -> None:
    one_lucky_sample(f, _)
    f.info(lambda info: info["spec"].update(limit=1))
    f.cover(rename=True)


def status_failed(f: Any, _: Any) -> None:
    f.info(lambda info: info.update(status="failed", error="Error: it broke"))


def status_running(f: Any, _: Any) -> None:
    f.info(lambda info: info.update(status="running"))


def number_of_400_digits(f: Any, _: Any) -> None:
    text = (f.run / "samples.jsonl").read_text()
    (f.run / "samples.jsonl").write_text(text.replace('"evicted":', f'"evicted":{"9" * 400}', 1))


def interval_of_words(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"]["params"].update(interval="timeout"))
    f.cover(rename=True)


def budget_spelled_otherwise(f: Any, _: Any) -> None:
    """Make another run of the same setting: another id, which two of a kind would count as."""
    f.info(lambda info: info["spec"].update(budget="384.0"))
    f.cover(rename=True)


def interval_of_words_in_a_plug_in(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(method="mine", params={"interval": "timeout"}))
    f.cover(rename=True)


def more_always_kept_than_there_is(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(budget="25%"))
    f.info(lambda info: info["spec"]["params"].update(sinks=1 << 39))
    f.cover(rename=True)


def numbers_written_as_text(f: Any, _: Any) -> None:
    f.trials(lambda row: row["kv"].update(evicted="9" * 400))


def a_billion_requests(f: Any, _: Any) -> None:
    f.trials(lambda row: row["usage"].update(requests=2**62))


def a_billion_trials(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(trials=2**62))
    f.cover(rename=True)


def another_clusters_sample(f: Any, _: Any) -> None:
    """Make groups of what is none, for a narrower interval."""
    f.trials(lambda row: row.update(cluster="one"))


def rows_said_to_be_computed_again(f: Any, _: Any) -> None:
    """Claim a restart, after which lengths need not add up."""
    f.trials(lambda row: row["kv"].update(recomputed=500))


def a_judges_column(f: Any, _: Any) -> None:
    f.trials(lambda row: row["metrics"].update(judge=1.0))


def events_moved(f: Any, _: Any) -> None:
    f.transcripts(
        lambda doc: [event.update(decoded=event["decoded"] - 1) for event in doc["events"]]
    )


def events_undone(f: Any, _: Any) -> None:
    """Say that nothing was evicted, so that the run looks like full at a lower peak."""
    f.trials(lambda row: row["kv"].update(events=0, evicted=0, rows_moved=0))
    f.turns(lambda row: row.update(events=0, evicted=0))
    f.transcripts(lambda document: document.update(events=[]))


def tokens_of_another_trial(f: Any, _: Any) -> None:
    names = sorted((f.run / "transcripts").glob("*.json"))
    first = json.loads(names[0].read_text())["generated"]
    f.transcripts(lambda document: document.update(generated=first))


def half_of_the_last_message_cut(f: Any, _: Any) -> None:
    def cut(document: dict[str, Any]) -> None:
        words = document["generated"][-1].split()
        document["generated"][-1] = " ".join(words[: len(words) // 2])

    f.transcripts(cut)


def retried_until_it_worked(f: Any, _: Any) -> None:
    """Say that the first attempts were lost to the infrastructure, four times."""
    rows = f.lines("samples.jsonl")
    lost = {"status": "infra_error", "score": None, "timing": {}}
    f.write(
        "samples.jsonl",
        [{**rows[0], **lost, "attempts": n} for n in range(1, 5)] + [{**rows[0], "attempts": 5}]
        + rows[1:],
    )  # fmt: skip


FORGERIES: list[tuple[Forgery, str]] = [
    (all_scores_one, "score: is 1.0, expected 0.0"),
    (all_scores_and_parts_one, "score: is 1.0, expected 0.0"),
    (failing_trials_deleted, "is missing"),
    (failing_trials_deleted_and_limit_lowered, "is missing"),
    (passing_record_copied, "seed: is"),
    (passing_record_copied_with_seeds, "prompt_sha: is"),
    (later_record_supersedes, "superseded by a later one"),
    (surplus_trials, "is beyond the 1 of the spec"),
    (provenance_emptied, "provenance.model_sha: is missing"),
    (data_hash_swapped, "provenance.task.episodes_sha: is"),
    (model_hash_swapped, "provenance.model_sha: is"),
    (peak_lowered, "kv.peak_live is"),
    (peak_bytes_lowered, "kv.peak_bytes: is"),
    (every_live_count_lowered, "live_after: is"),
    (peak_one_of_a_billion, "kv.peak_live is 1"),
    (smaller_budget_with_an_invented_prefill, "kv.longest_prefill: is 5000"),
    (smaller_budget_everywhere, "kv.prefill_tokens: is"),
    (budget_spelled_otherwise, "spec.budget: is not as this version writes it"),
    (fulls_answers_as_agentkv, "validity: budget_not_applied"),
    (renamed_to_another_method, "spec: "),
    (turns_emptied, "turns: is 0, expected"),
    (turns_removed, "turns.jsonl: is missing"),
    (turns_of_another_method, "turn"),
    (transcripts_emptied, "tokens generated: is []"),
    (transcripts_without_a_conversation, "transcript: is not what the generated tokens say"),
    (words_of_a_transcript_edited, "transcript: is not what the generated tokens say"),
    (seed_changed, "seed: is"),
    (seed_changed_in_the_records_only, "seed: is"),
    (prompt_hashes_invented, "prompt_sha: is 'abab"),
    (prompt_hashes_removed, "prompt_sha: is missing"),
    (unknown_task, "unknown task 'micro/recall-9k'"),
    (unknown_model, "its hash is that of a shipped one"),
    (unknown_sample_ids, "is not among those that micro/recall-1k gives here"),
    (more_right_than_asked, "metrics.act_right: is"),
    (ten_times_the_speed, "wall_s: is"),
    (ten_times_the_speed_of_turns, "timing.tpot_ms: is"),
    (no_time_at_all, "wall_s: is 1e-06"),
    (one_lucky_sample, "is missing"),
    (one_lucky_sample_as_a_run_of_one, "is missing"),
    (status_failed, "status: is 'failed', expected 'complete'"),
    (status_running, "status: is 'running', expected 'complete'"),
    (number_of_400_digits, "the most are 64 bits"),
    (interval_of_words, "interval=timeout: expected an integer"),
    (interval_of_words_in_a_plug_in, "interval: is 'timeout'"),
    (more_always_kept_than_there_is, "always keep more tokens than a session has"),
    (numbers_written_as_text, "samples.jsonl"),
    (a_billion_requests, "turns: is"),
    (a_billion_trials, "trials: is"),
    (another_clusters_sample, "cluster: is 'one', expected None"),
    (rows_said_to_be_computed_again, "kv.recomputed: is 500, expected 0"),
    (a_judges_column, "metrics.judge: is 1.0, expected None"),
    (events_moved, "event 0: is"),
    (events_undone, "kv."),
    (tokens_of_another_trial, "tokens generated: is"),
    (half_of_the_last_message_cut, "tokens generated: is"),
    (retried_until_it_worked, "attempts: is 4"),
]


@pytest.mark.parametrize(
    ("forge", "said"), FORGERIES, ids=[forge.__name__ for forge, _ in FORGERIES]
)
def test_a_forgery_is_refused(
    forge: Forgery, said: str, forger: Any, honest: dict[str, Path]
) -> None:
    forge(forger, honest)
    findings = [str(each) for each in validate(forger.cover()).findings]
    assert any(said in line for line in findings), findings
    assert all("could not be checked" not in line for line in findings)


def test_the_subject_itself_is_honest(forger: Any) -> None:
    verdict = validate(forger.cover())
    assert not verdict.findings
    assert [run.label for run in verdict.runs] == [Label.RESCORED]


def calibration_left_out(f: Any) -> None:
    f.info(lambda info: info["spec"].pop("calibration"))
    f.info(lambda info: info["provenance"].pop("calibration"))
    f.cover(rename=True)


def calibration_swapped_in_the_spec(f: Any) -> None:
    f.info(lambda info: info["spec"].update(calibration="ab" * 32))
    f.cover(rename=True)


def calibration_of_another_model(f: Any) -> None:
    f.info(lambda info: info["provenance"]["calibration"].update(model_sha="0" * 64))


def calibration_of_no_text(f: Any) -> None:
    f.info(lambda info: info["provenance"]["calibration"].pop("text_sha256"))


def calibration_of_a_method_without(f: Any) -> None:
    f.info(lambda info: info["provenance"].update(calibration={"sha256": "ab" * 32}))


def forged_findings(
    submit: Callable[..., Any], subject: str, forge: Callable[[Any], None]
) -> list[str]:
    """Return what is found in a submission that was sound before it was forged."""
    forged = submit(subject)
    assert not validate(forged.folder).findings
    forge(forged)
    return [str(each) for each in validate(forged.cover()).findings]


@pytest.mark.parametrize(
    ("subject", "forge", "said"),
    [
        ("calibrated", calibration_left_out, "spec.calibration: is missing"),
        ("calibrated", calibration_swapped_in_the_spec, "provenance.calibration.sha256: is"),
        ("calibrated", calibration_of_another_model, "provenance.calibration.model_sha: is"),
        ("calibrated", calibration_of_no_text, "calibration.text_sha256: is missing"),
        ("rkv", calibration_of_a_method_without, "provenance.calibration: is of no use to rkv"),
    ],
    ids=["left out", "swapped", "other model", "no text", "no need"],
)
def test_a_calibration_is_part_of_the_run(
    subject: str, forge: Callable[[Any], None], said: str, submit: Callable[..., Any]
) -> None:
    findings = forged_findings(submit, subject, forge)
    assert any(said in line for line in findings), findings


def a_setting_unnamed(f: Any) -> None:
    f.info(lambda info: info["provenance"].update(changed_settings={}))


def settings_left_out(f: Any) -> None:
    f.info(lambda info: info["provenance"].pop("changed_settings"))


def praise_for_a_setting(f: Any) -> None:
    praise = {"trained on": "the test set (SOTA)"}
    f.info(lambda info: info["provenance"].update(changed_settings=praise))


def praise_for_a_plug_ins_setting(f: Any) -> None:
    praise_for_a_setting(f)
    a_plug_in_nobody_has(f, None)


def a_plug_ins_setting(f: Any) -> None:
    a_plug_in_nobody_has(f, None)
    params = json.loads((f.run / "run.json").read_text())["spec"]["params"]
    own = {"interval": params["interval"]}
    f.info(lambda info: info["provenance"].update(changed_settings=own))


@pytest.mark.parametrize(
    ("subject", "forge", "said"),
    [
        ("agentkv", a_setting_unnamed, "is {}, expected {'interval': 64}"),
        ("agentkv", settings_left_out, "is {}, expected {'interval': 64}"),
        ("rkv", praise_for_a_setting, "is {'trained on': 'the test set (SOTA)'}, expected {}"),
        ("rkv", praise_for_a_plug_ins_setting, "is {'trained on': 'the test set (SOTA)'}"),
        ("rkv", a_plug_ins_setting, ""),
        ("rkv", settings_left_out, ""),  # as runs of before have none
    ],
)
def test_nobody_chooses_the_name_that_is_printed(
    subject: str, forge: Callable[[Any], None], said: str, submit: Callable[..., Any]
) -> None:
    findings = forged_findings(submit, subject, forge)
    assert all(f"provenance.changed_settings: {said}" in line for line in findings), findings
    assert bool(findings) is bool(said)


def faster_in_every_file(f: Any, _: Any) -> None:
    def scale(row: dict[str, Any], names: tuple[str, ...]) -> None:
        row.update({name: row[name] / 10 for name in names if row[name] is not None})

    f.info(lambda info: info.update(wall_s=info["wall_s"] / 10))
    f.turns(lambda row: scale(row, ("ttft_ms", "tpot_ms")))
    medians(f)
    f.trials(lambda row: scale(row["timing"], ("e2e_s",)))


def medians(f: Any) -> None:
    from statistics import median

    turns = f.lines("turns.jsonl")

    def own(row: dict[str, Any]) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            known = [t[name] for t in turns if t["sample_id"] == row["sample_id"]]
            row["timing"][name] = median(value for value in known if value is not None)

    f.trials(own)


def first_sample_as_a_run_of_one(f: Any, _: Any) -> None:
    rows = f.lines("samples.jsonl")
    drop_trials(f, [row for row in rows if row["sample_id"] == "recall-1k-0"])
    f.info(lambda info: info["spec"].update(limit=1))
    f.cover(rename=True)


def a_plug_in_nobody_has(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(method="mine"))
    f.cover(rename=True)


def transcripts_left_out(f: Any, _: Any) -> None:
    shutil.rmtree(f.run / "transcripts")
    f.trials(right)


def a_model_nobody_has(f: Any, _: Any) -> None:
    f.info(lambda info: info["spec"].update(model="huge-900b"))
    f.info(lambda info: info["provenance"].update(model_sha="0" * 64))
    f.cover(rename=True)


LABELLED: list[tuple[Forgery, Label, str]] = [
    # Nobody but the machine that ran knows how long it took; a rerun measures another one.
    (faster_in_every_file, Label.RESCORED, ""),
    # This is what an honest run of one sample looks like. The board must print its n.
    (first_sample_as_a_run_of_one, Label.RESCORED, ""),
    # The tokens do give the scores; that a method called so would keep these rows is its claim.
    (a_plug_in_nobody_has, Label.RESCORED, "method mine is a plug-in that is not here"),
    (transcripts_left_out, Label.SELF_REPORTED, "the transcripts are not in the submission"),
    (a_model_nobody_has, Label.SELF_REPORTED, "model huge-900b is not here"),
]


@pytest.mark.parametrize(
    ("forge", "label", "note"), LABELLED, ids=[forge.__name__ for forge, _, _ in LABELLED]
)
def test_what_no_record_can_disprove_is_labelled(
    forge: Forgery, label: Label, note: str, forger: Any, honest: dict[str, Path]
) -> None:
    forge(forger, honest)
    verdict = validate(forger.cover())
    assert not verdict.findings, verdict.findings[:3]
    (run,) = verdict.runs
    assert run.label is label
    assert any(note in each for each in run.notes) or not note


@pytest.mark.parametrize(
    ("prefix", "name", "value", "found"),
    [
        ("shared", "cached_tokens", None, False),
        ("shared", "cached_tokens", 500, True),
        ("shared", "shared", 500, True),
        ("own", "cached_tokens", 0, False),
        ("own", "cached_tokens", 100, True),
        ("own", "shared", 100, True),
    ],
)
def test_no_more_was_shared_than_a_system_message(
    prefix: str,
    name: str,
    value: int | None,
    found: bool,
    forger_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    settings = {"protect": "system", "prefix": prefix, "interval": "64"}
    values = {"engine": "embedded", "model": "micro", "task": "micro/recall-1k", "limit": 2}
    spec = resolve(RunSpec(method="agentkv", budget=512, **values), settings)
    run_one(spec, tmp_path, lambda *_: None)
    forged = forger_of(tmp_path / spec.id, tmp_path / "submission")
    rows = forged.lines("samples.jsonl")
    assert bool(rows[0]["kv"]["shared"]) is (prefix == "shared")
    if value is not None:
        forged.trials(lambda row: row["kv"].update({name: value}))
    findings = [str(each) for each in validate(forged.cover()).findings]
    assert any(f"kv.{name}: is" in each for each in findings) is found, findings
