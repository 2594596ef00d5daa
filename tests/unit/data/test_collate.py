"""Batches: padding, masks, positions, columns; conversations and pairs to learn from."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlsys.config.schema.data import DPODataConfig, RMDataConfig, SFTDataConfig
from rlsys.data.collate import (
    collate_answers,
    collate_prompts,
    collate_texts,
    position_ids,
)
from rlsys.data.dataset import PromptDataset
from rlsys.data.supervised import load_texts
from rlsys.protocol import DataProto, object_array
from rlsys.protocol.rows import pad_rows
from rlsys.utils.errors import DataError
from tests.start_tokenizer import build_tokenizer

tokenizer = cache(build_tokenizer)
PAD, EOS, USER, ASSISTANT = 0, 1, 3, 4


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def prompt_rows(tmp_path: Path) -> PromptDataset:
    extra = [{"index": "a7", "tools_kwargs": {"t": 1}}, None]
    rows = [
        {"prompt": q, "data_source": "s", "ground_truth": 1, "extra_info": e, "agent_name": q}
        for q, e in zip(["1", "22+3"], extra)
    ]
    return PromptDataset.load(jsonl(tmp_path / "a.jsonl", rows), tokenizer())


def test_prompts_are_padded_on_the_left(tmp_path: Path) -> None:
    rows = list(prompt_rows(tmp_path))
    data = collate_prompts(rows, pad_token_id=PAD, epoch=3, prompt_length=8)
    assert data.batch is not None
    one, two = (tokenizer()(t)["input_ids"] for t in ("1", "22+3"))
    assert data.batch["prompts"].tolist() == [
        [PAD] * 4 + [USER, *one, EOS, ASSISTANT],
        [PAD, USER, *two, EOS, ASSISTANT],
    ]
    assert data.batch["attention_mask"].tolist() == [[0] * 4 + [1] * 4, [0] + [1] * 7]
    assert data.batch["position_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert {t.dtype for t in data.batch.values()} == {torch.int64}
    columns = {name: list(values) for name, values in data.non_tensor_batch.items()}
    assert columns["uid"] == ["3-0", "3-1"]
    assert columns["index"] == ["a7", 1]
    assert columns["tools_kwargs"] == [{"t": 1}, {}]
    assert columns["agent_name"] == ["1", "22+3"]
    assert columns["reward_model"] == [{"style": "rule", "ground_truth": 1}] * 2
    assert columns["raw_prompt"][0] == [{"role": "user", "content": "1"}]
    assert collate_prompts(rows, pad_token_id=PAD).batch["prompts"].shape == (2, 7)  # pyrefly: ignore[unsupported-operation]
    with pytest.raises(ValueError, match="7 tokens does not fit into 6"):
        collate_prompts(rows, pad_token_id=PAD, prompt_length=6)


def test_a_batch_travels(tmp_path: Path) -> None:
    data = collate_prompts(list(prompt_rows(tmp_path)), pad_token_id=PAD)
    data.save_to_disk(str(tmp_path / "batch"))
    again = DataProto.load_from_disk(str(tmp_path / "batch"))
    assert again.non_tensor_batch["extra_info"].tolist() == data.non_tensor_batch["extra_info"].tolist()


@given(st.lists(st.lists(st.integers(1, 99), max_size=6), min_size=1, max_size=5), st.integers(6, 9))
def test_padding_and_positions_undo(rows: list[list[int]], length: int) -> None:
    for side in ("left", "right"):
        padded = pad_rows(rows, value=0, left=side == "left", length=length)
        assert padded.shape == (len(rows), length)
        assert [[t for t in row if t] for row in padded.tolist()] == rows
    mask = (pad_rows(rows, value=0, left=True, length=length) > 0).long()
    assert [p[length - len(r) :] for p, r in zip(position_ids(mask).tolist(), rows)] == [[*range(len(r))] for r in rows]


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3?"},
    {"role": "assistant", "content": "45"},
]


def shown(row: Any) -> str:
    (text,) = row
    ids, mask = list(text.response_ids), list(text.mask)
    return "".join(f"[{tokenizer().decode([t])}]" if m else tokenizer().decode([t]) for t, m in zip(ids, mask))


def test_all_answers_of_a_conversation_are_learnt_and_nothing_else(tmp_path: Path) -> None:
    text = load_texts(jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer())[0]
    assert tokenizer().decode(list(text[0].prompt_ids)) == "<|system|>s<|end|><|user|>1+1=<|end|><|assistant|>"
    assert shown(text) == "[2][<|end|>]<|user|>3?<|end|><|assistant|>[4][5][<|end|>]"


def test_what_a_template_writes_after_the_end_is_not_learnt(tmp_path: Path) -> None:
    own = build_tokenizer()
    own.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    text = load_texts(jsonl(tmp_path / "a.jsonl", [{"messages": CHAT[1:]}]), own)[0]
    assert shown(text) == "[2][<|end|>]\n<|user|>3?<|end|>\n<|assistant|>[4][5][<|end|>]"


def test_without_a_template_an_answer_still_ends(tmp_path: Path) -> None:
    own = build_tokenizer()
    own.chat_template = None
    form = SFTDataConfig(messages_key=None, response_key="answer")
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(DataError, match="no assistant message"):
        load_texts(jsonl(tmp_path / "b.jsonl", [{"messages": CHAT[:2]}]), own)
    assert shown(load_texts(file, own, form)[0]).endswith("2][<|end|>]")


def test_columns_of_prompt_and_response_are_taken_where_there_is_no_conversation(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}]
    file = jsonl(tmp_path / "a.jsonl", rows)
    assert shown(load_texts(file, tokenizer(), SFTDataConfig(response_key="completion"))[0]) == "[2][<|end|>]"
    nested = jsonl(tmp_path / "nested.jsonl", [{"extra_info": {"question": "1+1", "answer": "2"}}])
    names = {"prompt_dict_keys": ("question",), "response_dict_keys": ("answer",)}
    form = SFTDataConfig(prompt_key="extra_info", response_key="extra_info", **names)
    assert shown(load_texts(nested, tokenizer(), form)[0]) == "[2][<|end|>]"
    with pytest.raises(DataError, match=r"column 'response' is missing: set data\.response_key=completion"):
        load_texts(file, tokenizer(), SFTDataConfig())


def test_tool_calls_are_rendered_or_refused(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    row = {"messages": [{"role": "user", "content": "1+1="}, call]}
    file = jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match="message 1 has tool_calls, which the chat template does not render"):
        load_texts(file, tokenizer())
    own = build_tokenizer()
    own.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls %}{{ c.name }}(){% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert shown(load_texts(file, own)[0]) == "[a][d][d][(][)][<|end|>]"


def test_texts_are_laid_out_like_generated_rows(tmp_path: Path) -> None:
    form = SFTDataConfig(messages_key=None)
    rows = [{"prompt": "1", "response": "23"}, {"prompt": "45", "response": "6"}]
    dataset = load_texts(jsonl(tmp_path / "a.jsonl", rows), tokenizer(), form)
    data = collate_texts([dataset[0], dataset[1]], pad_token_id=PAD)
    assert data.batch is not None
    d = {c: tokenizer()(c)["input_ids"][0] for c in "123456"}
    assert data.batch["input_ids"].tolist() == [
        [PAD, USER, d["1"], EOS, ASSISTANT, d["2"], d["3"], EOS],
        [USER, d["4"], d["5"], EOS, ASSISTANT, d["6"], EOS, PAD],
    ]
    assert data.batch["attention_mask"].tolist() == [[0] + [1] * 7, [1] * 7 + [0]]
    assert data.batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 0]]
    assert data.batch["response_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert torch.equal(torch.cat([data.batch["prompts"], data.batch["responses"]], 1), data.batch["input_ids"])


def test_an_answer_that_was_cut_off_has_no_end_for_a_reward_model_with_another_template() -> None:
    own = build_tokenizer()
    own.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    ids = {c: tokenizer()(c)["input_ids"][0] for c in "2345"}
    answers = torch.tensor([[ids["2"], ids["3"], EOS], [ids["2"], ids["3"], ids["4"]], [EOS, PAD, PAD]])
    batch = DataProto.from_dict(
        {"responses": answers, "attention_mask": torch.cat([torch.ones(3, 1, dtype=torch.int64), answers != PAD], 1)},
        {
            "raw_prompt": object_array([[{"role": "user", "content": "5"}]] * 3),
            "finish_reason": object_array(["stop", "length", "stop"]),
        },
    )
    rows = collate_answers(batch, tokenizer=tokenizer(), own=own).tensors
    held = [ids[mask.bool()] for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
    texts = [tokenizer().decode(one) for one in held]
    assert texts == [f"<|user|>5<|end|>\n<|assistant|>{answer}" for answer in ("23<|end|>", "234", "<|end|>")]


def test_an_answer_that_was_cut_off_keeps_its_tokens_for_a_reward_model_without_an_end_token() -> None:
    own = build_tokenizer()
    own.chat_template, own.eos_token = "{% for m in messages %}{{ m.content }}{% endfor %}", None
    answers = torch.tensor([tokenizer()("23")["input_ids"]])
    batch = DataProto.from_dict(
        {"responses": answers, "attention_mask": torch.ones(1, 3, dtype=torch.int64)},
        {"raw_prompt": object_array([[{"role": "user", "content": "5"}]]), "finish_reason": object_array(["length"])},
    )
    rows = collate_answers(batch, tokenizer=tokenizer(), own=own).tensors
    assert tokenizer().decode(rows["input_ids"][0]) == "523"


def test_pairs_become_neighbouring_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "chosen": "2", "rejected": [{"role": "assistant", "content": "34"}]}]
    dataset = load_texts(jsonl(tmp_path / "a.jsonl", rows), tokenizer(), RMDataConfig())
    data = collate_texts([dataset[0]], pad_token_id=PAD)
    assert data.batch is not None
    responses = [tokenizer().decode(r, skip_special_tokens=True) for r in data.batch["responses"].tolist()]
    assert responses == ["2", "34"]
    assert torch.equal(data.batch["prompts"][0], data.batch["prompts"][1])


def test_whole_conversations_of_a_pair_share_their_prompt(tmp_path: Path) -> None:
    shared = [{"role": r, "content": c} for r, c in (("user", "1"), ("assistant", "2"), ("user", "3"))]
    answers = {"chosen": "4", "rejected": "56"}
    row = {name: [*shared, {"role": "assistant", "content": text}] for name, text in answers.items()}
    ((chosen, rejected),) = load_texts(jsonl(tmp_path / "a.jsonl", [row]), tokenizer(), DPODataConfig())
    with_prompt = jsonl(tmp_path / "b.jsonl", [{"prompt": shared, **answers}])
    ((same, _),) = load_texts(with_prompt, tokenizer(), DPODataConfig())
    assert list(chosen.prompt_ids) == list(rejected.prompt_ids) == list(same.prompt_ids)
    texts = [tokenizer().decode(text.response_ids, skip_special_tokens=True) for text in (chosen, rejected, same)]
    assert texts == ["4", "56", "4"]
    as_messages = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    with_prompt = jsonl(tmp_path / "c.jsonl", [{"prompt": shared, **as_messages}])
    ((also, _),) = load_texts(with_prompt, tokenizer(), DPODataConfig())
    assert (list(also.prompt_ids), list(also.response_ids)) == (list(same.prompt_ids), list(same.response_ids))


def test_a_labelled_response_is_followed_by_its_prompt_with_another_rows_response(tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": c, "label": c == "22"} for p, c in (("11", "22"), ("3", "4444"), ("5", "6"))]
    config = DPODataConfig(max_length=9)
    dataset = load_texts(jsonl(tmp_path / "a.jsonl", rows), tokenizer(), config, is_kto=True)
    data = collate_texts(list(dataset), pad_token_id=PAD)
    assert data.batch is not None
    responses = [tokenizer().decode(r, skip_special_tokens=True) for r in data.batch["responses"].tolist()]
    assert responses == ["22", "4444", "4444", "6", "6", "22"]
    assert data.batch["response_mask"].sum(1).tolist() == [3, 4, 5, 2, 2, 3]
    assert data.batch["is_desirable"].tolist() == [True, False, False, False, False, False]
    for bad, message in (({"label": 2}, "'label' must be true or false"), ({}, "data.label_key=<column>")):
        file = jsonl(tmp_path / "bad.jsonl", [{"prompt": "1", "completion": "2"} | bad])
        with pytest.raises(DataError, match=message):
            load_texts(file, tokenizer(), config, is_kto=True)


BLANK = {"role": "assistant", "content": " "}


def test_a_blank_answer_that_is_not_learnt_is_allowed(tmp_path: Path) -> None:
    messages = [CHAT[1], {**BLANK, "weight": 0}, *CHAT[1:3]]
    assert shown(load_texts(jsonl(tmp_path / "a.jsonl", [{"messages": messages}]), tokenizer())[0]) == "[2][<|end|>]"


BAD_TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({}, "column 'prompt' is missing: set data.prompt_key=<column>"),
    "null messages": ({"messages": None}, "column 'messages' must be"),
    "no answer": ({"messages": CHAT[:2]}, "no assistant message"),
    "answer first": ({"messages": CHAT[2:]}, "no prompt before it"),
    "bad role": ({"messages": [{"role": "bot", "content": "a"}]}, "'bot' is not one of"),
    "too long": ({"messages": [CHAT[1], {"role": "assistant", "content": "9" * 99}]}, "max_length=40"),
    "blank answer": ({"messages": [*CHAT, CHAT[1], BLANK]}, "message 6 is a blank answer"),
    "null answer": ({"messages": [CHAT[1], {"role": "assistant", "content": None}]}, "message 1 has no 'content'"),
    "ShareGPT": ({"messages": [{"from": "human", "value": "1"}]}, "rename its keys from and value"),
    "ShareGPT's column": ({"conversations": []}, ", or for a conversation data.messages_key=conversations"),
}


@pytest.mark.parametrize("kind", BAD_TEXTS)
def test_bad_texts_are_refused_or_skipped(kind: str, tmp_path: Path) -> None:
    bad, message = BAD_TEXTS[kind]
    file = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}, bad])
    with pytest.raises(DataError, match="line 2") as caught:
        load_texts(file, tokenizer(), SFTDataConfig(max_length=40))
    assert message in str(caught.value)
    assert len(load_texts(file, tokenizer(), SFTDataConfig(max_length=40, bad_rows="skip"))) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "1", "chosen": "2"}, "column 'rejected' is missing: set data.rejected_key=<column>"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, "are the same"),
        ({"prompt": "1", "chosen": " ", "rejected": "2"}, "'chosen' is blank"),
        ({"prompt": "1", "chosen": "2", "rejected": [BLANK]}, "message 1 is a blank answer"),
        ({"prompt": "1", "chosen": [{"role": "user", "content": "x"}], "rejected": "2"}, "not the assistant's"),
        ({"prompt": "", "chosen": "1", "rejected": "2"}, "'prompt' is blank"),
    ],
)
def test_bad_pairs_are_refused(bad: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_texts(jsonl(tmp_path / "a.jsonl", [bad]), tokenizer(), RMDataConfig())


@pytest.mark.parametrize(
    ("how", "prompt", "response"),
    [
        ("right", "<|user|>12<|end|><|assistant|>", "[3]"),
        ("left", "<|assistant|>", "[3][4][5][6][<|end|>]"),
        ("middle", "<|user|>12", "[5][6][<|end|>]"),
    ],
)
def test_texts_are_truncated_as_a_whole(how: Any, prompt: str, response: str, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "12", "response": "3456"}])
    form = SFTDataConfig(messages_key=None, max_length=6, truncation=how)
    text = load_texts(file, tokenizer(), form)[0]
    assert (tokenizer().decode(list(text[0].prompt_ids)), shown(text)) == (prompt, response)
    whole = load_texts(file, tokenizer(), SFTDataConfig(messages_key=None, max_length=60, truncation=how))[0]
    assert (text[0].is_truncated, whole[0].is_truncated) == (True, False)
    with pytest.raises(DataError, match="nothing to learn is left"):
        load_texts(file, tokenizer(), SFTDataConfig(messages_key=None, max_length=4, truncation="right"))
    with pytest.raises(ValidationError, match="truncation"):
        SFTDataConfig(truncation="none")  # pyrefly: ignore[bad-argument-type]
