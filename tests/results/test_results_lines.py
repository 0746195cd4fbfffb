"""Reading lines: what older versions wrote, what is refused and why, and that nothing raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv import load_results
from agentbench_kv.errors import UsageError
from agentbench_kv.results.baseline import read_baseline, save_baseline
from agentbench_kv.results.files import append_lines, json_bytes
from agentbench_kv.results.frame import problems
from agentbench_kv.results.lines import Lines, parse_lines, read_lines
from agentbench_kv.results.records import (
    REFUSED,
    Count,
    KVAccount,
    Timing,
    TrialRecord,
    TrialStatus,
    TurnRecord,
    Usage,
    encode,
)
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.site.runpage import read_turns

# Written, read and judged by the pydantic records that came before.
OLD = Path(__file__).parent / "data" / "old"
RUN = OLD / "run"
VERDICTS = json.loads((OLD / "verdicts.json").read_bytes())
# Fields that came later; an older record has their defaults.
SINCE = {
    "window_bytes_read": 0, "protected": 0, "refused": 0, "refused_recent": 0,
    "refused_budget": None, "rewrites": 0, "auxiliary_calls": 0, "auxiliary_tokens": 0,
    "auxiliary_s": 0.0, "peak_bytes": 0, "peak_alone": 0, "cached_tokens": 0, "shared": 0,
    "auxiliary_bytes_read": 0,
}  # fmt: skip
KINDS = {"TrialRecord": TrialRecord, "TurnRecord": TurnRecord}


def read(kind: type[msgspec.Struct], *lines: bytes) -> Lines[Any]:
    return parse_lines((line + b"\n" for line in lines), kind)


def test_an_old_run_reads_as_it_did():
    run, expected = RunReader(RUN), json.loads((OLD / "read.json").read_bytes())
    trials, turns = run.trial_lines(), run.turn_lines()
    for trial in expected["trials"]:
        trial["kv"] |= SINCE
    assert msgspec.to_builtins(run.trials()) == expected["trials"]
    assert msgspec.to_builtins(run.turns()) == expected["turns"]
    assert [odd.line for odd in trials.unreadable] == expected["odd_trials"]
    assert [odd.line for odd in turns.unreadable] == expected["odd_turns"]
    assert (trials.torn, turns.torn) == (True, True)
    assert [odd.reason for odd in (*trials.unreadable, *turns.unreadable)] == [
        "unknown field flavour, kv.spin",
        "unknown field mood",
        "turn: Expected `int`, got `str`",
    ]


def test_table_and_page_read_an_old_run_as_the_reader_does():
    frame = load_results(RUN)
    assert frame["sample_id"].tolist() == [record.sample_id for record in RunReader(RUN).trials()]
    assert problems(frame)["line"].tolist()[:1] == [7]
    assert [turn for trial in read_turns(RUN / "turns.jsonl") for turn in trial] == RunReader(
        RUN
    ).turns()


@pytest.mark.parametrize(("name", "kind"), [("samples", TrialRecord), ("turns", TurnRecord)])
def test_lines_are_written_as_they_were(name, kind):
    odd = {each.line for each in read_lines(RUN / f"{name}.jsonl", kind).unreadable}
    whole = (RUN / f"{name}.jsonl").read_bytes().splitlines()[:-1]
    for number, line in enumerate(whole, start=1):
        if number not in odd:
            # As text, so that the order of fields and `1` or `1.0` count; 1e+22 is 1e22.
            again = encode(msgspec.json.decode(line, type=kind))
            document = json.loads(line)
            if "kv" in document:
                document["kv"] |= SINCE
            assert json.dumps(json.loads(again)) == json.dumps(document)


def test_an_old_baseline_reads_and_is_written_as_it_was(tmp_path):
    raw = (OLD / "old.json").read_bytes()
    (run,) = read_baseline(raw, "old").runs
    known = [record for record in RunReader(RUN).trials() if record.sample_id != "s5"]
    blank = {"transcript": None, "error": None, "usage": Usage()}
    assert run.trials == [msgspec.structs.replace(r, **blank) for r in sorted(known, key=key)]
    # 0.1 took what an engine failed at for the agent's failure; now such a run is not finished.
    with pytest.raises(UsageError, match="1 lost to engine or infrastructure"):
        save_baseline("old", read_baseline(raw, "old").loaded(tmp_path), tmp_path)
    played = raw.replace(b'"engine_error"', b'"timeout"')
    assert played != raw
    runs = read_baseline(played, "old").loaded(tmp_path)
    written = json.loads(save_baseline("old", runs, tmp_path).read_bytes())
    old = json.loads(played)["runs"][0]
    assert json.dumps(written["runs"][0]["trials"]) == json.dumps(old["trials"])


def key(record: TrialRecord) -> tuple[str, int]:
    return record.key


def as_sent(sent: Any, stored: Any) -> bool:
    """Whether a value was stored without being changed; a whole number makes a float."""
    if isinstance(stored, dict):
        return all(as_sent(each, stored[name]) for name, each in sent.items())
    if isinstance(stored, int) and not -(2**63) <= stored < 2**63:
        return False
    if type(sent) is int and type(stored) is float:
        return float(sent) == stored
    return type(sent) is type(stored) and sent == stored


def verdicts() -> list[Any]:
    return [
        pytest.param(KINDS[name], VERDICTS[name]["line"], place, accepted, id=f"{name}-{place}")
        for name in KINDS
        for place, accepted in VERDICTS[name]["accepted"].items()
    ]


@pytest.mark.parametrize(("kind", "line", "place", "accepted"), verdicts())
def test_strictness_is_the_old_one_but_nothing_is_converted(kind, line, place, accepted):
    """Text or a boolean for a number, 1.0 for an int and numbers no JSON has are refused now."""
    *parents, name = place.split(".")
    for value in (None, *VERDICTS["values"]):
        document = json.loads(json.dumps(line))
        target = document
        for parent in parents:
            target = target[parent]
        if value is None:
            target.pop(name, None)
        else:
            target[name] = "@"
        told = "absent" if value is None else value
        raw = json.dumps(document).replace('"@"', told).encode()
        if told in accepted and (value is None or as_sent(json.loads(value), accepted[told])):
            stored = msgspec.to_builtins(msgspec.json.decode(raw, type=kind))
            for part in (*parents, name):
                stored = stored.get(part)
            wanted = accepted[told] | SINCE if place == "kv" else accepted[told]
            assert stored == wanted, told
        else:
            with pytest.raises(REFUSED):
                msgspec.json.decode(raw, type=kind)


def test_unknown_fields_are_left_out_and_reported(tmp_path, make_trial):
    path = tmp_path / "samples.jsonl"
    newer = json.loads(encode(make_trial("newer", kv={"events": 3})))
    newer |= {"flavour": "mint"}
    newer["kv"]["spin"] = 1
    other = {"sample_id": "x", "status": "exploded"}
    append_lines(path, [json_bytes(newer), json_bytes(other), encode(make_trial("old"))])
    lines = read_lines(path, TrialRecord)
    assert [record.sample_id for record in lines.records] == ["newer", "old"]
    assert lines.records[0].kv.events == 3
    assert [(odd.line, odd.reason) for odd in lines.unreadable] == [
        (1, "unknown field flavour, kv.spin"),
        (2, "status: Invalid enum value 'exploded'"),
    ]


def test_a_missing_file_reads_as_empty(tmp_path):
    lines = read_lines(tmp_path / "none.jsonl", TrialRecord)
    assert (lines.records, lines.unreadable, lines.torn) == ([], [], False)


@settings(max_examples=40, deadline=None)
@given(garbage=st.binary(max_size=80), place=st.integers(0, 2))
def test_garbage_never_raises_and_never_hides_a_good_line(
    tmp_path_factory, make_trial, garbage, place
):
    path = tmp_path_factory.mktemp("garbage") / "samples.jsonl"
    good = [encode(make_trial(f"s{i}")) + b"\n" for i in range(2)]
    path.write_bytes(b"".join([*good[:place], garbage, b"\n", *good[place:]]))
    lines = read_lines(path, TrialRecord)
    assert [record.sample_id for record in lines.records] == ["s0", "s1"]
    assert len(lines.unreadable) == sum(bool(part.strip()) for part in garbage.split(b"\n"))


MINIMAL = {"sample_id": "s", "trial": 0, "seed": 1, "status": "scored", "score": 1.0}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"kv": {"events": 2**63}}, "kv.events"),
        ({"kv": {"events": 10**400}}, "kv.events"),
        ({"metrics": {"huge": 2**63}}, "metrics"),
        ({"metrics": {"huge": 10**400}}, "metrics"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"score": 1.5}, "score"),
        ({"sample_id": ""}, "sample_id"),
        ({"timing": {"ttft_ms": -1}}, "timing.ttft_ms"),
        ({"timing": {"ttft_ms": -1}, "flavour": "mint"}, "timing.ttft_ms"),
        ({"status": "timeout"}, "score"),
        ({"score": None}, "score"),
        ({"score": None, "flavour": "mint"}, "score"),
    ],
)
def test_the_reason_names_the_field(change, place):
    found = read(TrialRecord, json.dumps(MINIMAL | change).encode())
    assert not found.records
    assert place in found.unreadable[0].reason


@pytest.mark.parametrize(
    "value", [b"[" * 100_000, b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 100_000, b"9" * 10_000]
)
@pytest.mark.parametrize("name", [b"metrics", b"kv", b"flavour", b"seed"])
def test_deep_or_long_values_are_unreadable_lines(name, value):
    line = encode(MINIMAL)[:-1] + b',"' + name + b'":' + value + b"}"
    found = read(TrialRecord, line, encode(MINIMAL))
    assert [len(found.records), [odd.line for odd in found.unreadable]] == [1, [1]]
    torn = parse_lines([line[:-1]], TrialRecord)
    assert torn.torn or torn.unreadable


texts = st.text(st.characters(codec="utf-8"), max_size=8)
counts = st.integers(0, 2**63 - 1)
amounts = st.floats(0, allow_infinity=False)
metrics = st.none() | texts | st.integers(-(2**63), 2**63 - 1) | st.floats()


def parts(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Fill any of the fields of a flat record."""
    strategies = {
        field.name: counts if field.type is Count or field.name.endswith("budget") else amounts
        for field in msgspec.structs.fields(kind)
    }
    return st.fixed_dictionaries({}, optional=strategies).map(lambda fields: kind(**fields))


@st.composite
def trial_records(draw: st.DrawFn) -> TrialRecord:
    status = draw(st.sampled_from(TrialStatus))
    scored = status is TrialStatus.SCORED
    return TrialRecord(
        sample_id=draw(texts.filter(bool)),
        trial=draw(counts),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        status=status,
        score=draw(st.floats(0, 1)) if scored else None,
        metrics=draw(st.dictionaries(texts, metrics, max_size=4)),
        kv=draw(parts(KVAccount)),
        timing=draw(parts(Timing)) if scored else Timing(),
        usage=draw(parts(Usage)),
        error=draw(st.none() | st.text(max_size=8)),
        attempts=draw(st.integers(1, 9)),
    )


@settings(max_examples=150, deadline=None)
@given(record=trial_records())
def test_what_is_written_reads_back(record):
    line = encode(record)
    assert b"\n" not in line
    found = read(TrialRecord, line)
    assert found == Lines(records=[record])


tokens = st.sampled_from([b"\n", b'"', b"}", b"\\ud800", b",", b"9" * 20])
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from([TrialRecord, TurnRecord]))
def test_no_line_raises_and_each_is_read_or_reported(data, kind):
    """Any values in any fields, then any damage to the bytes."""
    names = st.sampled_from([*kind.__struct_fields__, "flavour"])
    document = VERDICTS[kind.__name__]["line"] | data.draw(st.dictionaries(names, junk))
    raw = bytearray(json.dumps(document).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3)
            | st.sampled_from([b"\n", b'"', b"}", b"\\ud800", b",", b"9" * 20])
        )
    lines = [line + b"\n" for line in bytes(raw).split(b"\n")]
    found = parse_lines(lines, kind)
    full = sum(bool(line.strip()) for line in lines)
    assert max(len(found.records), len(found.unreadable)) <= full
    assert len(found.records) + len(found.unreadable) >= full
    for record in found.records:
        assert read(kind, encode(record)) == Lines(records=[record])
