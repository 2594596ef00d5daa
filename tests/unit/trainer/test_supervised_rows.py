"""Which rows SFT trains on, as the data section says."""

import json
from pathlib import Path

import pytest

from rlsys.config import DPOConfig, SFTConfig, load_config
from rlsys.utils.errors import DataError
from tests.start_tokenizer import build_tokenizer
from trainer.local_files import load_tokenizer
from trainer.texts import load_rows

MESSAGES = "data.messages_key=messages"
OWN = """
class Doubled:
    def __init__(self, data_files, tokenizer, config, processor, max_samples):
        self.rows = [line.strip() for file in data_files for line in open(file)]
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return {"prompt": self.rows[i], "response": self.rows[i] * 2}
"""


def answers(config: SFTConfig) -> list[str]:
    tokenizer = build_tokenizer()
    rows, _ = load_rows(config, tokenizer)
    return [tokenizer.decode(rows[i][0].response_ids, skip_special_tokens=True) for i in range(len(rows))]


def sft_config(tmp_path: Path, *overrides: str) -> SFTConfig:
    common = ["trainer.backend=local", f"trainer.default_local_dir={tmp_path}/run", "data.messages_key=null"]
    build_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return load_config([*common, f"model.path={tmp_path}", "data.train_batch_size=1", *overrides], SFTConfig)


def test_a_dataset_class_of_the_users_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text("a\nbc\n")
    own = [f"data.custom_cls.path={tmp_path}/own.py", "data.custom_cls.name=Doubled"]
    assert answers(sft_config(tmp_path, f"data.train_files={tmp_path}/rows.jsonl", *own)) == ["aa", "bcbc"]


def test_a_part_of_the_rows_is_drawn_by_the_seed_where_rows_are_shuffled(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "?", "response": str(i)}) for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    some = [f"data.train_files={tmp_path}/rows.jsonl", "data.train_max_samples=5"]
    drawn = [answers(sft_config(tmp_path, *some, f"data.seed={seed}")) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert answers(sft_config(tmp_path, *some, "data.shuffle=false")) == ["0", "1", "2", "3", "4"]


def dpo_config(tmp_path: Path, row: dict[str, object], *overrides: str) -> DPOConfig:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    common = [f"model.path={tmp_path}", f"data.train_files={tmp_path}/rows.jsonl", "data.train_batch_size=1"]
    return load_config([*common, *overrides], DPOConfig)


def test_pairs_and_labels_are_asked_for_by_the_loss(tmp_path: Path) -> None:
    pair, single = {"prompt": "1", "chosen": "2", "rejected": "3"}, {"prompt": "1", "completion": "2", "label": True}
    for row, loss_type, needed in (
        (pair, "kto", "label_key=<column>, or another"),
        (single, "sigmoid", "'rejected' is missing"),
    ):
        with pytest.raises(DataError, match=needed):
            load_rows(dpo_config(tmp_path, row, f"dpo.loss_type={loss_type}"), build_tokenizer())


def test_rows_of_pairs_and_labels_are_what_the_loss_takes(tmp_path: Path) -> None:
    row = {"prompt": "1", "chosen": "2", "rejected": "3", "completion": "4", "label": True}
    tokenizer = build_tokenizer()
    chosen, rejected = load_rows(dpo_config(tmp_path, row), tokenizer)[0][0]
    texts = [tokenizer.decode(text.response_ids, skip_special_tokens=True) for text in (chosen, rejected)]
    assert texts == ["2", "3"]
    text, _ = load_rows(dpo_config(tmp_path, row, "dpo.loss_type=kto"), tokenizer)[0][0]
    assert (tokenizer.decode(text.response_ids, skip_special_tokens=True), text.is_desirable) == ("4", True)


def test_a_label_may_be_in_a_column_of_objects(tmp_path: Path) -> None:
    row = {"prompt": "1", "completion": "2", "extra_info": {"label": True}}
    config = dpo_config(tmp_path, row, "data.label_key=extra_info.label", "dpo.loss_type=kto")
    text, _ = load_rows(config, build_tokenizer())[0][0]
    assert text.is_desirable is True


def test_an_answer_ends_where_generation_ends(tmp_path: Path) -> None:
    """Models such as Gemma end a turn with a token of generation_config.json that is not the tokenizer's end token."""
    turns = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2")) * 2]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    config = sft_config(tmp_path, f"data.train_files={tmp_path}/rows.jsonl", MESSAGES)
    tokenizer = build_tokenizer()
    tokenizer.eos_token = "<|tool|>"
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    rows, _ = load_rows(config, load_tokenizer(config.model))
    text = rows[0][0]
    assert tokenizer.decode(text.response_ids) == "2<|end|><|user|>1<|end|><|assistant|>2<|end|>"
    learnt = [token for token, is_learnt in zip(text.response_ids, text.mask, strict=True) if is_learnt]
    assert tokenizer.decode(learnt) == "2<|end|>2<|end|>"


def test_labels_may_be_text_as_in_csv_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "rows.csv").write_text("prompt,completion,label\n1,2,True\n1,3,false\n1,2,1\n1,3,0.0\n")
    common = [f"model.path={tmp_path}", f"data.train_files={tmp_path}/rows.csv", "data.train_batch_size=1"]
    config = load_config([*common, "dpo.loss_type=kto", "data.shuffle=false"], DPOConfig)
    rows, _ = load_rows(config, build_tokenizer())
    assert [rows[row][0].is_desirable for row in range(4)] == [True, False, True, False]
    (tmp_path / "rows.csv").write_text("prompt,completion,label\n1,2,nan\n")
    with pytest.raises(DataError, match="column 'label' must be true or false"):
        load_rows(config, build_tokenizer())


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def test_answers_of_weight_0_are_not_learnt(tmp_path: Path) -> None:
    messages: list[dict[str, object]] = [*turns("1", "2", "3", "4", "5", "6")]
    for at, weight in ((1, 0), (3, 1), (5, 0)):
        messages[at] = messages[at] | {"weight": weight}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    rows, _ = load_rows(sft_config(tmp_path, f"data.train_files={tmp_path}/rows.jsonl", MESSAGES), build_tokenizer())
    text, decode = rows[0][0], build_tokenizer().decode
    assert decode(text.prompt_ids) == "<|user|>1<|end|><|assistant|>2<|end|><|user|>3<|end|><|assistant|>"
    assert (decode(text.response_ids), set(text.mask)) == ("4<|end|>", {1})


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": turns("1", "2"), "rejected": turns("one", "3")},
        {"chosen": turns("1", "2", "3", "4"), "rejected": turns("1", "2", "three", "4")},
        {"prompt": "1", "chosen": turns("1", "2"), "rejected": "3"},
    ],
)
def test_responses_to_different_prompts_are_not_compared(tmp_path: Path, row: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    files = [f"model.path={tmp_path}", f"data.train_files={tmp_path}/rows.jsonl", "data.train_batch_size=1"]
    with pytest.raises(DataError, match="the prompts of the responses differ"):
        load_rows(load_config(files, DPOConfig), build_tokenizer())


def test_earlier_answers_in_a_prompt_are_not_learnt_and_all_of_a_response_is(tmp_path: Path) -> None:
    answers = [*turns("4", "5", "6")[1:], {"role": "assistant", "content": "7"}]
    row = {"prompt": turns("1", "2", "3"), "response": answers, "completion": answers, "label": True}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = sft_config(tmp_path, f"data.train_files={tmp_path}/rows.jsonl")
    kto = [f"model.path={tmp_path}", f"data.train_files={tmp_path}/rows.jsonl", "data.train_batch_size=1"]
    for settings in (config, load_config([*kto, "dpo.loss_type=kto"], DPOConfig)):
        rows, _ = load_rows(settings, build_tokenizer())
        text, decode = rows[0][0], build_tokenizer().decode
        assert decode(text.prompt_ids) == "<|user|>1<|end|><|assistant|>2<|end|><|user|>3<|end|><|assistant|>"
        assert decode([i for i, mask in zip(text.response_ids, text.mask, strict=True) if mask]) == "5<|end|>7<|end|>"


def test_a_template_that_drops_earlier_reasoning_allows_one_answer_a_row(tmp_path: Path) -> None:
    """As Qwen3's, which shows the reasoning of the last answer alone."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}0{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages: list[dict[str, object]] = [*turns("0", "1", "2", "3")]
    tokenizer, file = build_tokenizer(), tmp_path / "rows.jsonl"
    tokenizer.chat_template = template
    file.write_text(json.dumps({"messages": messages}))
    config = sft_config(tmp_path, f"data.train_files={file}", MESSAGES)
    with pytest.raises(DataError, match="changes earlier turns: give all answers but the last `weight: 0`"):
        load_rows(config, tokenizer)
    messages[1] |= {"weight": 0}
    file.write_text(json.dumps({"messages": messages}))
    rows, _ = load_rows(config, tokenizer)
    assert tokenizer.decode(rows[0][0].response_ids) == "03<|end|>"
