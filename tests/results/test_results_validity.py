from __future__ import annotations

import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.results.validity import assess, budget_bounds

BUDGET, INTERVAL, PREFILL = 256, 128, 90
BOUND = BUDGET + INTERVAL + PREFILL


@pytest.fixture
def compressed(make_trial):
    """Build one trial of a compressed run with one event and the given peak."""

    def build(sample="s0", peak=BOUND, events=1, logical=900, **fields):
        kv = {"peak_live": peak, "longest_prefill": PREFILL, "events": events, "logical": logical}
        return make_trial(sample, kv=kv, **fields)

    return build


@pytest.mark.parametrize(("peak", "state"), [(BOUND, "valid"), (BOUND + 1, "budget_not_applied")])
def test_the_bound_itself_is_within_the_budget(spec, compressed, peak, state):
    record = compressed(peak=peak)
    assert budget_bounds(spec, [record]) == [BOUND]
    assert assess(spec, [record], expected=1).state == state


def test_the_worst_sample_is_named_with_its_figures(spec, compressed):
    trials = [
        compressed("mild", BOUND + 3),
        compressed("worst", BOUND + 50),
        compressed("fine", BOUND),
    ]
    (reason,) = assess(spec, trials, expected=3).reasons
    assert "2 trials" in reason
    assert f"sample worst trial 0 held {BOUND + 50} tokens, 50 over" in reason
    assert "256 + 128 + 90" in reason


def test_a_failed_trial_is_evidence_too(spec, compressed):
    trials = [compressed("a"), compressed("b", BOUND + 1, status="timeout")]
    assert assess(spec, trials).state == "budget_not_applied"


@pytest.mark.parametrize("logical", [BUDGET, BUDGET + 1])
def test_a_compressed_run_that_never_triggered_did_not_apply_its_budget(spec, compressed, logical):
    trials = [compressed(name, 200, events=0, logical=logical) for name in "ab"]
    verdict = assess(spec, trials, expected=2)
    relation = "<=" if logical == BUDGET else ">"
    assert verdict.state == "budget_not_applied"
    assert verdict.reasons == [
        f"never triggered; logical tokens at most {logical} {relation} budget 256"
    ]
    assert (verdict.triggered_samples, verdict.samples) == (0, 2)


@pytest.mark.parametrize(
    ("trigger", "logical", "cured"),
    [
        ("every", BUDGET + 1, True),
        ("every", BUDGET, False),
        ("prefill+every", BUDGET + 1, False),
        ("slack", BUDGET + 1, False),
    ],
)
def test_the_line_names_the_trigger_that_would_help(spec, compressed, trigger, logical, cured):
    one = {**spec, "params": {"trigger": trigger, "interval": 64}}
    one.pop("interval")
    (reason,) = assess(one, [compressed("a", 200, events=0, logical=logical)], expected=1).reasons
    assert reason.startswith("never triggered; logical tokens at most")
    assert ("every 64th generated token" in reason) is cured
    assert ("--set trigger=prefill+every" in reason) is cured


def test_one_triggered_sample_is_enough(spec, compressed):
    trials = [compressed("a", events=0), compressed("b", events=1), compressed("b", trial=1)]
    verdict = assess(spec, trials, expected=3)
    assert (verdict.state, verdict.triggered_samples, verdict.samples) == ("valid", 1, 2)


@pytest.mark.parametrize("method", ["full", "full-constrained", "full@any"])
def test_runs_without_compression_need_no_events(spec, compressed, method):
    trials = [compressed(peak=10**6, events=0)]
    assert assess(spec | {"method": method}, trials).state == "valid"
    assert assess(spec | {"method": method, "budget": None}, trials).state == "valid"


def test_a_method_without_a_budget_has_no_bound(spec, compressed):
    sidequest = spec | {"method": "sidequest", "budget": None}
    assert assess(sidequest, [compressed(peak=10**6, events=0)]).state == "valid"
    assert budget_bounds(sidequest, [compressed()]) == []


def test_the_interval_comes_from_the_spec_then_the_method_then_the_default(spec, compressed):
    bare = {key: value for key, value in spec.items() if key != "interval"}
    assert budget_bounds(bare, [compressed()]) == [BOUND]
    assert budget_bounds(bare | {"params": {"interval": 8}}, [compressed()]) == [BOUND - 120]
    given = bare | {"params": None, "set": {"interval": "8"}}
    assert budget_bounds(given, [compressed()]) == [BOUND - 120]
    assert budget_bounds(spec | {"interval": 0}, [compressed()]) == [BOUND - 128]


TRIGGER = 900


@pytest.fixture
def dropping(spec):
    """Describe a run whose policy drops messages above a length of its own, with no budget."""
    params = {"trigger": str(TRIGGER), "exec": "text", "keep": 3}
    own = {"method": "clear-tools", "budget": None, "params": params}
    return {name: value for name, value in spec.items() if name != "interval"} | own


@pytest.mark.parametrize(("over", "state"), [(0, "valid"), (1, "budget_not_applied")])
def test_a_trigger_of_its_own_bounds_a_policy(dropping, compressed, over, state):
    record = compressed(peak=TRIGGER + PREFILL + over, logical=2000)
    assert budget_bounds(dropping, [record]) == [TRIGGER + PREFILL]
    verdict = assess(dropping, [record], expected=1)
    assert verdict.state == state
    if over:
        assert verdict.reasons == [
            "1 trials exceeded the trigger; worst: sample s0 trial 0 held 991 tokens, 1 over the "
            "bound 900 + 90 (trigger + longest prefill)"
        ]


@pytest.mark.parametrize("trigger", ["context", "budget", "9" * 5000, None])
def test_a_trigger_that_is_no_length_bounds_nothing(dropping, compressed, trigger):
    dropping["params"]["trigger"] = trigger
    assert budget_bounds(dropping, [compressed(peak=10**6)]) == []


def test_a_trigger_of_a_method_that_drops_no_messages_bounds_nothing(dropping, compressed):
    del dropping["params"]["exec"]
    assert budget_bounds(dropping | {"method": "plug-in"}, [compressed(peak=10**6)]) == []


@pytest.mark.parametrize(("alone", "state"), [(990, "valid"), (991, "budget_not_applied")])
def test_what_is_asked_beside_a_session_is_no_part_of_its_bound(dropping, make_trial, alone, state):
    kv = {"peak_live": 1500, "peak_alone": alone, "longest_prefill": PREFILL, "events": 1}
    record = make_trial(kv={**kv, "logical": 2000, "auxiliary_tokens": 600})
    assert assess(dropping, [record], expected=1).state == state


@pytest.mark.parametrize(("asked", "cure"), [(0, "--set fork_every=N"), (3, "train sidequest")])
def test_where_the_model_decides_no_trigger_is_advised(spec, make_trial, asked, cure):
    given = spec | {"method": "sidequest-prompted", "budget": None}
    given["params"] = {"exec": "span", "fork_every": 4, "fork_tokens": 256}
    record = make_trial(kv={"peak_live": 900, "logical": 900, "auxiliary_calls": asked})
    (reason,) = assess(given, [record], expected=1).reasons
    assert f"asked {asked} times (fork_every=4)" in reason
    assert cure in reason
    assert "trigger=" not in reason


def test_a_history_that_was_changed_is_given_as_the_reason(dropping, compressed):
    record = compressed(peak=TRIGGER + PREFILL + 1, logical=2000, session_resets=4)
    (reason,) = assess(dropping, [record], expected=1).reasons
    assert "its history was changed 4 times" in reason


def test_with_a_budget_the_bound_is_that_of_any_method(dropping, compressed):
    assert budget_bounds(dropping | {"budget": BUDGET}, [compressed()]) == [BOUND]


def test_missing_and_unfinished_trials_make_a_run_incomplete(spec, compressed):
    one = [compressed("a")]
    assert assess(spec, one, expected=1).state == "valid"
    missing = assess(spec, one, expected=2)
    assert (missing.state, missing.reasons) == ("incomplete", ["1 of 2 trials finished"])
    assert assess(spec | {"expected_trials": 2}, one).state == "incomplete"
    for status in ("infra_error", "engine_error"):
        lost = assess(spec, [*one, compressed("b", status=status)])
        assert lost.state == "incomplete"
        (reason,) = lost.reasons
        assert reason.startswith("1 of 2 trials finished; 1 lost to engine or infrastructure")
    failed = [*one, compressed("b", status="timeout")]
    assert assess(spec, failed, expected=2).state == "valid"
    assert assess(spec, []).reasons == ["no trials"]


def test_dropped_trials_of_samples_that_are_there_make_a_run_incomplete(spec, compressed):
    """Failed ones were left out, and the number of those expected made to fit."""
    kept = [compressed("a"), compressed("a", trial=1), compressed("b")]
    assert assess(spec | {"trials": 2}, kept, expected=3).reasons == ["3 of 4 trials finished"]
    assert assess(spec | {"trials": 2}, [*kept, compressed("b", trial=1)]).state == "valid"
    with pytest.raises(UsageError, match="the trials of the run is"):
        assess(spec | {"trials": [3]}, kept)


def test_excess_outweighs_incompleteness_which_outweighs_silence(spec, compressed):
    excess = assess(spec, [compressed(peak=BOUND + 1)], expected=9)
    assert (excess.state, len(excess.reasons)) == ("budget_not_applied", 2)
    silent = assess(spec, [compressed(events=0)], expected=9)
    assert (silent.state, len(silent.reasons)) == ("incomplete", 2)


def test_prompts_that_differ_from_the_other_arm_are_drift(spec, compressed):
    ours = [compressed("a", prompt_sha="1"), compressed("b", prompt_sha="2"), compressed("c")]
    same = [compressed("a", prompt_sha="1"), compressed("z", prompt_sha="9")]
    assert assess(spec, ours, reference=same).state == "valid"
    other = [compressed("a", prompt_sha="1"), compressed("b", prompt_sha="x")]
    verdict = assess(spec, ours, reference=other)
    assert verdict.state == "drift"
    assert "1 of 2 trials, first in sample b trial 0" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("given", "events", "state"),
    [(90, 1, "valid"), (342, 1, "budget_not_applied"), (342, 0, "valid")],
)
def test_a_share_the_method_raised_to_its_least_was_not_applied(
    spec, make_trial, given, events, state
):
    """EVOKE's blocks of 128 take 342 tokens: 38 % of such a session, whatever the run is called."""
    rows = [(given, events), (90, 1)]
    trials = [
        make_trial(f"s{i}", kv={"peak_live": 200, "logical": 900, "budget": own, "events": count})
        for i, (own, count) in enumerate(rows)
    ]
    verdict = assess({**spec, "budget": "10%"}, trials, expected=2)
    assert verdict.state == state
    if state != "valid":
        (reason,) = verdict.reasons
        assert "given 342 tokens" in reason
        assert "10% of 900 are 90" in reason


@pytest.mark.parametrize(
    ("method", "provenance", "state"),
    [
        ("memart@qwen", {}, "budget_not_applied"),  # records from before provenance said so
        ("mem0", None, "budget_not_applied"),
        ("mine", {"remembers": True}, "budget_not_applied"),
        ("mine", {}, "valid"),  # of its own parameter `topk` nobody knows what it is
    ],
)
def test_a_memory_is_known_by_what_it_is(spec, make_trial, method, provenance, state):
    asked = {**spec, "method": method, "budget": None, "params": {"topk": 8}}
    nothing = [make_trial("a", kv={"logical": 90, "peak_live": 90})]
    verdict = assess(asked, nothing, expected=1, provenance=provenance)
    assert verdict.state == state
    rows = [make_trial("a", kv={"logical": 90, "peak_live": 98, "restored": 8})]
    texts = [make_trial("a", kv={"logical": 90, "peak_live": 90}, metrics={"recalled_texts": 1})]
    for found in (rows, texts):
        assert assess(asked, found, expected=1, provenance=provenance).state == "valid"
