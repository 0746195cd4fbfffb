"""Calls in model text, and what of them may reach the benchmark's executor."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.adapters.bfcl.worker.session import WrittenCall, parse, to_python

TOOLS = {"mv", "cat"}


def marked(payload):
    return f"<tool_call>\n{payload}\n</tool_call>"


def evaluate(source, **tools):
    try:
        return eval(source, {"mv": lambda **k: k, **tools})
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def test_several_calls_in_order():
    text = (
        "First. "
        + marked('{"name": "mv", "arguments": {"a": 1}}')
        + marked('{"name": "cat", "arguments": "{\\"b\\": [null, true]}"}')
    )
    assert parse(text) == (
        [WrittenCall("mv", {"a": 1}), WrittenCall("cat", {"b": [None, True]})],
        0,
    )


@pytest.mark.parametrize(
    "payload",
    ["", "mv(a=1)", "{", '{"name": "mv"}', '{"name": 3, "arguments": {}}', "[1]", "null",
     '{"name": "mv", "arguments": [1]}', '{"name": "mv", "arguments": "x"}', "[" * 100_000],
)  # fmt: skip
def test_unparsable_payloads_are_counted(payload):
    assert parse(marked(payload)) == ([], 1)


@pytest.mark.parametrize("opened", ["[", '{"b": '])
@pytest.mark.parametrize(("levels", "calls"), [(60, 1), (70, 0), (900, 0)])
def test_arguments_nested_deeper_than_any_tools_are_no_call(opened, levels, calls):
    closed = "]" if opened == "[" else "}"
    value = opened * levels + "1" + closed * levels
    found, unparsable = parse(marked(f'{{"name": "mv", "arguments": {{"a": {value}}}}}'))
    assert (len(found), unparsable) == (calls, 1 - calls)


def test_reading_calls_takes_no_time_that_grows_with_a_power_of_the_text():
    blank = " \n" * 500_000
    assert parse(f"<tool_call>{blank}") == ([], 1)
    assert parse(f"<tool_call>{blank}" * 2) == ([], 2)
    call = '{"name": "mv", "arguments": {}}'
    assert parse(f"<tool_call>{blank}{call}{blank}</tool_call>") == ([WrittenCall("mv", {})], 0)


def test_a_call_that_never_closes_is_unparsable():
    assert parse('<tool_call>\n{"name": "mv", "arguments": {}}') == ([], 1)


def test_known_call_becomes_a_call():
    call = WrittenCall("mv", {"source": "a'b", "flag": True, "none": None, "s": "Zürich"})
    assert evaluate(to_python(call, TOOLS)) == call.arguments


@pytest.mark.parametrize(
    "name",
    ["__import__('os').getcwd", "print", "eval", "os.system", "mv(a=1) or cat", "lambda: 0", "",
     "for", "unknown", "mv ", "\uff4d\uff56", "method", "x\n"],
)  # fmt: skip
def test_names_that_are_not_tools_never_run(name):
    ran = []
    call = WrittenCall(name, {"a": 1})
    source = to_python(call, TOOLS)
    result = evaluate(source, print=ran.append, unknown=ran.append, method=ran.append)
    assert result == f"NameError: name {name!r} is not defined"
    assert not ran


@pytest.mark.parametrize(
    "key", ["x=__import__('os').getpid(),y", "a b", "", "lambda", "1", "*", "**{'a':1}, b", "ä"]
)
def test_argument_names_are_checked(key):
    source = to_python(WrittenCall("mv", {key: 1}), TOOLS)
    assert evaluate(source) == "SyntaxError: invalid syntax"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.text(), st.dictionaries(st.text(), json_values, max_size=3))
def test_nothing_but_a_tool_ever_runs(name, arguments):
    payload = json.dumps({"name": name, "arguments": arguments})
    calls, _ = parse(marked(payload))
    for call in calls:
        source = to_python(call, TOOLS)
        assert source.startswith(("mv(", "cat(", "(_ for _ in ()).throw(NameError("))
        tree = compile(source.encode("utf-8", "backslashreplace"), "call", "eval")
        assert set(tree.co_names) <= {"mv", "cat", "throw", "NameError", "SyntaxError"}


@given(st.dictionaries(st.text(), json_values, min_size=1, max_size=3))
def test_arguments_are_literals(arguments):
    source = to_python(WrittenCall("mv", arguments), TOOLS)
    tree = compile(source.encode("utf-8", "backslashreplace"), "call", "eval")
    assert set(tree.co_names) <= {"mv", "throw", "SyntaxError", "inf", "nan"}
