"""Tool calls are read from every format that models write; what is malformed carries its error."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.agent.tool_calls import PARSERS, ToolCall, parse_tool_calls
from tests.timing import scaled_s

ARGUMENTS = {"a": 1, "text": 'x "}</b'}
JSON = json.dumps(ARGUMENTS)
CALL = ToolCall("add", ARGUMENTS)
DEEPSEEK = "<｜tool▁call▁begin｜>{}add{}{}<｜tool▁call▁end｜>"
THOUGHT = "<|channel|>analysis<|message|>I add.<|end|>"
HARMONY = "<|channel|>commentary to=functions.add "

WRITTEN = [
    ("hermes", f'Let me see.\n<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>', "Let me see."),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {json.dumps(JSON)}}}', ""),
    ("llama3", f'{{"name": "add", "parameters": {JSON}}}', ""),
    ("llama3", f'<|python_tag|>{{"name": "add", "parameters": {JSON}}}', ""),
    ("mistral", f'Sure[TOOL_CALLS] [{{"name": "add", "arguments": {JSON}}}]', "Sure"),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{JSON}", ""),
    ("deepseek", DEEPSEEK.format("function<｜tool▁sep｜>", "\n```json\n", JSON + "\n```"), ""),
    ("deepseek", "<｜tool▁calls▁begin｜>" + DEEPSEEK.format("", "<｜tool▁sep｜>", JSON) + "<｜tool▁calls▁end｜>", ""),
    ("gpt-oss", f"{THOUGHT}<|start|>assistant{HARMONY}<|constrain|>json<|message|>{JSON}<|call|>", THOUGHT),
    ("gpt-oss", f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{JSON}", ""),
    ("json", f'First:\n```json\n{{"name": "add", "arguments": {JSON}}}\n```', "First:"),
]


@pytest.mark.parametrize(("format", "text", "content"), WRITTEN)
def test_a_call_is_read(format, text, content):
    assert parse_tool_calls(text, format) == (content, [CALL])


def test_several_calls_keep_their_order():
    one = '<tool_call>{"name": "f%d", "arguments": {}}</tool_call>'
    assert [c.name for c in parse_tool_calls(one % 1 + one % 2, "hermes")[1]] == ["f1", "f2"]
    assert [c.name for c in parse_tool_calls('{"name": "f1"}; {"name": "f2"}', "llama3")[1]] == ["f1", "f2"]
    assert [c.name for c in parse_tool_calls('[TOOL_CALLS][{"name": "f1"}, {"name": "f2"}]', "mistral")[1]] == [
        "f1",
        "f2",
    ]


def test_a_python_block_is_a_call_of_python():
    text = "Compute:\n```python\nprint(6*7)\n```\nDone."
    assert parse_tool_calls(text, "python") == ("Compute:\n\nDone.", [ToolCall("python", {"code": "print(6*7)\n"})])


@pytest.mark.parametrize(
    ("format", "text", "error"),
    [
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>["f"]</tool_call>', "must be"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{1"}</tool_call>', "arguments are not JSON"),
        ("json", '{"name": "f", "arguments": {', "not JSON"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{1", "not JSON"),
        ("gpt-oss", f"{HARMONY}<|message|>{{1<|call|>", "arguments are not JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    ],
)
def test_a_malformed_call_has_an_error(format, text, error):
    _, (call,) = parse_tool_calls(text, format)
    assert error in call.error


@pytest.mark.parametrize("start", ["", "<tool_call>{", "<｜tool▁call▁begin｜>f\n```json\n", "to=functions.f"])
@pytest.mark.parametrize("format", PARSERS)
def test_an_answer_of_white_space_is_read_at_once(format, start):
    text = start + 100_000 * " " + "x"
    start_s = time.process_time()
    parse_tool_calls(text, format)
    assert time.process_time() - start_s < scaled_s(2)


def test_text_without_calls_is_unchanged():
    for format in PARSERS:
        assert parse_tool_calls(' 2 < 3 and {"x": 1} ', format) == (' 2 < 3 and {"x": 1} ', [])


@given(st.sampled_from(list(PARSERS)), st.text(alphabet='<>/{}[]",:`\n tool_calARGSjsonpy') | st.text())
def test_no_text_breaks_a_parser(format, text):
    parse_tool_calls(text, format)
