"""What is appended to a conversation is what the template itself writes, whatever the history; or it is refused."""

import pytest

from rlsys.agent.template import ChatTemplate
from rlsys.agent.trace import Span
from rlsys.types import Finish
from rlsys.utils.errors import ConfigError
from tests.start_tokenizer import build_tokenizer
from tests.unit.agent.templates import APPENDING, COUNTING, HERMES, NO_TOOLS, THINKING, tokenizer_with

ASK = [{"role": "user", "content": "hi"}]
NEXT = [{"role": "user", "content": "more"}]


def drawn(tokenizer, text: str) -> Span:
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    n = len(ids)
    return Span(ids, None, 0, (0.0,) * n, (0.0,) * n, (0,) * n, Finish.STOP)


@pytest.mark.parametrize("name", APPENDING)
def test_an_appended_conversation_is_the_rendered_one(name):
    tokenizer = tokenizer_with(APPENDING[name])
    template = ChatTemplate(tokenizer, kinds=("user", "tool"))
    last = drawn(tokenizer, "yes<|im_end|>")
    ids = template.encode(None, ASK)[0] + last.ids + template.encode(last, NEXT)[0]
    whole = template.encode(None, [*ASK, {"role": "assistant", "content": "yes"}, *NEXT])[0]
    if name == "thinking":  # the template drops the thinking that its prompt begins; what was drawn keeps it
        whole_text, text = tokenizer.decode(whole), tokenizer.decode(ids)
        assert text == whole_text.replace("assistant\nyes", "assistant\n<think>yes")
    else:
        assert ids == whole


def test_half_a_surrogate_pair_is_a_question_mark():
    """A tool that reads a file of another encoding returns it; the episode failed with a TypeError."""
    tokenizer = tokenizer_with(HERMES)
    template = ChatTemplate(tokenizer, kinds=("tool",))
    results = [[{"role": "tool", "name": "f", "tool_call_id": "1", "content": text}] for text in ("a\ud800b", "a?b")]
    broken, whole = (template.encode(drawn(tokenizer, "yes<|im_end|>"), messages) for messages in results)
    assert broken == whole


def test_tool_results_are_appended_behind_the_calls_that_the_model_wrote():
    tokenizer = tokenizer_with(HERMES)
    template = ChatTemplate(tokenizer, kinds=("tool",))
    results = [{"role": "tool", "name": "f", "tool_call_id": f"call0000{n}", "content": f"{n}"} for n in (1, 2)]
    text = tokenizer.decode(template.encode(drawn(tokenizer, "<tool_call>..</tool_call><|im_end|>"), results)[0])
    assert text == (
        "\n<|im_start|>user<tool_response>\n1\n</tool_response><tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_turn_that_was_cut_off_is_ended_with_given_tokens():
    tokenizer = tokenizer_with(HERMES)
    template = ChatTemplate(tokenizer, kinds=("user",))
    cut, ended = (template.encode(drawn(tokenizer, text), NEXT)[0] for text in ("yes", "yes<|im_end|>"))
    assert cut == (tokenizer.eos_token_id, *ended)


def test_thinking_of_earlier_turns_stays():
    tokenizer = tokenizer_with(THINKING)
    template = ChatTemplate(tokenizer, kinds=("user",))
    last = drawn(tokenizer, "hmm</think>yes<|im_end|>")
    text = tokenizer.decode(template.encode(None, ASK)[0] + last.ids + template.encode(last, NEXT)[0])
    assert "<think>hmm</think>yes" in text


@pytest.mark.parametrize(("template", "kind"), [(COUNTING, "user"), (COUNTING, "tool"), (NO_TOOLS, "tool")])
def test_a_template_that_cannot_append_is_refused_with_the_kind_of_message(template, kind):
    with pytest.raises(ConfigError, match=rf"cannot append {kind} messages.*custom_chat_template"):
        ChatTemplate(tokenizer_with(template), kinds=(kind,))


def test_the_same_template_may_append_one_kind_and_not_the_other():
    assert ChatTemplate(tokenizer_with(NO_TOOLS), kinds=("user",))


def test_the_start_tokenizer_and_a_tokenizer_without_template_append():
    ChatTemplate(build_tokenizer(), kinds=("user", "tool"))
    plain = tokenizer_with(None)
    template = ChatTemplate(plain, kinds=("user",))
    assert plain.decode(template.encode(drawn(plain, "yes"), NEXT)[0]) == "\nmore"
