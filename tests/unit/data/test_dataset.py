"""Prompts from every kind of file, templates, truncation, sampling, datasets user-defined."""

import datetime
import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlsys.config import PPOConfig
from rlsys.config.schema.data import CustomClassConfig, PromptsConfig
from rlsys.data.chat import Truncation, encode_prompt, truncate
from rlsys.data.dataset import PromptDataset, configured_source
from rlsys.data.rows import default_source
from rlsys.utils.errors import ConfigError, DataError
from tests.start_tokenizer import build_tokenizer

tokenizer = cache(build_tokenizer)


def row(i: int, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "rlsys/arithmetic",
        "prompt": [{"role": "user", "content": f"{i}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i},
        **changes,
    }


def texts(dataset: PromptDataset) -> list[str]:
    return [tokenizer().decode(list(r.token_ids)) for r in dataset]


def test_all_kinds_of_files_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [row(i) for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "b.json").write_text("\n".join(json.dumps(r) for r in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    cells = [json.dumps(json.dumps(r["prompt"])).replace('\\"', '""') for r in rows]
    lines = [f"{c},{r['data_source']},{i + 1},math" for i, (c, r) in enumerate(zip(cells, rows))]
    (tmp_path / "a.csv").write_text("prompt,data_source,ground_truth,ability\n" + "\n".join(lines))
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    files = ["a.parquet", "a.jsonl", "b.json", "a.json", "a.csv", "saved"]
    loaded = [PromptDataset.load(str(tmp_path / f), tokenizer()) for f in files]
    assert all(texts(d) == [f"<|user|>{i}+1=<|end|><|assistant|>" for i in range(5)] for d in loaded)
    assert {d.fingerprint for d in loaded} == {loaded[0].fingerprint}
    assert [r.reward_model["ground_truth"] for r in loaded[4]] == ["1", "2", "3", "4", "5"]
    assert [r.extra_info["index"] for r in loaded[5]] == list(range(5))
    both = PromptDataset.load([str(tmp_path / "a.parquet"), str(tmp_path / "a.csv")], tokenizer())
    assert [r.index for r in both] == list(range(10))
    assert both.fingerprint != loaded[0].fingerprint


def test_values_that_json_has_not_become_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)
    pq.write_table(pa.Table.from_pylist([row(0, extra_info={"index": 0, "made": when}, price=1.5)]), path)
    prompts = PromptDataset.load(str(path), tokenizer())[0]
    assert prompts.extra_info == {"index": 0, "made": "2026-01-02 03:04:05"}
    assert prompts.fields == {"price": 1.5}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_prompts_are_rendered_by_the_template_with_its_arguments(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [row(0), row(1, prompt="2*3=")])
    own = build_tokenizer()
    own.chat_template = "{{ messages[-1].content }}{% if think %}<|tool|>{% endif %}"
    assert texts(PromptDataset.load(file, tokenizer())) == [
        "<|user|>0+1=<|end|><|assistant|>",
        "<|user|>2*3=<|end|><|assistant|>",
    ]
    with_think = PromptDataset.load(file, own, PromptsConfig(apply_chat_template_kwargs={"think": True}))
    assert texts(with_think) == ["0+1=<|tool|>", "2*3=<|tool|>"]
    own.chat_template = None
    assert texts(PromptDataset.load(file, own)) == ["0+1=", "2*3="]


def test_other_columns_can_hold_prompt_and_source(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"question": "5-1=", "task": "sums", "ground_truth": 4, "agent_name": "x"}])
    prompts = PromptDataset.load(file, tokenizer(), PromptsConfig(prompt_key="question", reward_fn_key="task"))
    assert (prompts[0].data_source, prompts[0].reward_model) == ("sums", {"style": "rule", "ground_truth": 4})
    assert prompts[0].fields == {"agent_name": "x", "task": "sums"}, "graders and teachers read it by its name"
    assert prompts.data_sources == ("sums",)


def test_rows_need_no_data_source_where_a_reward_model_scores_them() -> None:
    scored = PPOConfig.model_validate({"reward": {"reward_model": {"enable": True}}})
    assert (default_source(scored), default_source(PPOConfig())) == ("custom", None)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_questions_and_answers_are_read_by_the_names_of_their_columns(kind: str, tmp_path: Path) -> None:
    file = str(tmp_path / f"a.{kind}")
    if kind == "jsonl":
        jsonl(tmp_path / "a.jsonl", [{"question": "5-1=", "answer": "4"}])
    elif kind == "csv":
        (tmp_path / "a.csv").write_text("question,answer\n5-1=,4\n")
    else:
        pq.write_table(pa.Table.from_pylist([{"question": "5-1=", "answer": "4"}]), file)
    form = PromptsConfig(prompt_key="question", answer_key="answer")
    prompts = PromptDataset.load(file, tokenizer(), form, default_source="custom")
    assert texts(prompts) == ["<|user|>5-1=<|end|><|assistant|>"]
    assert (prompts[0].data_source, prompts[0].reward_model["ground_truth"]) == ("custom", "4")
    with pytest.raises(DataError) as caught:
        PromptDataset.load(file, tokenizer())
    assert "column 'prompt' is missing: set data.prompt_key=question; " in str(caught.value)
    assert "column 'reward_model' is missing: set data.answer_key=answer; " in str(caught.value)
    assert "column 'data_source' is missing: set data.reward_fn_key=<column>, or reward.custom" in str(caught.value)
    assert str(caught.value).endswith("the columns are 'question', 'answer'")


def test_the_template_sees_all_keys_of_a_message(tmp_path: Path) -> None:
    own = build_tokenizer()
    own.chat_template = "{% for m in messages %}{{ m.name }}:{{ m.content }}{{ m.reasoning_content }}{% endfor %}"
    messages = [
        {"role": "user", "content": "hi", "name": "bob", "reasoning_content": None},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]
    pq.write_table(pa.Table.from_pylist([row(0, prompt=messages)]), tmp_path / "a.parquet")
    prompts = PromptDataset.load(str(tmp_path / "a.parquet"), own)
    assert own.decode(list(prompts[0].token_ids)) == "bob:hi:hm"
    assert prompts[0].raw_prompt == [
        {"role": "user", "content": "hi", "name": "bob"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


LONG = [row(0), row(1, prompt="a" * 20), row(2)]  # 3 special tokens each


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("left", "aaaaaaaa<|end|><|assistant|>"),
        ("right", "<|user|>aaaaaaaaa"),
        ("middle", "<|user|>aaaaaaa<|end|><|assistant|>"),
    ],
)
def test_every_truncation_is_alive(how: Any, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = jsonl(tmp_path / "a.jsonl", LONG)
    prompts = PromptDataset.load(file, tokenizer(), PromptsConfig(max_prompt_length=10, truncation=how))
    assert texts(prompts)[1] == text
    assert len(prompts[1].token_ids) == 10
    assert prompts.metrics()["data/truncated_prompts"] == 1
    assert "cut 1 of 3 prompts to 10 tokens" in caplog.messages, "also where no metrics are kept, as of validation"


def test_overlong_prompts_are_refused_or_filtered_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = jsonl(tmp_path / "a.jsonl", LONG)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: 23 tokens are more than data\.max_prompt_length=10"):
        PromptDataset.load(file, tokenizer(), PromptsConfig(max_prompt_length=10))
    for num_threads in (1, 3):
        config = PromptsConfig(
            max_prompt_length=10, filter_overlong_prompts=True, filter_overlong_prompts_workers=num_threads
        )
        prompts = PromptDataset.load(file, tokenizer(), config)
        assert [r.index for r in prompts] == [0, 1]
        counts = {"data/rows": 2.0, "data/bad_rows": 0.0, "data/overlong_prompts": 1.0, "data/truncated_prompts": 0.0}
        assert prompts.metrics() == counts
        assert "dropped 1 of 3 prompts with more than 10 tokens" in caplog.messages
    with pytest.raises(DataError, match=r"no prompt is left: .* data\.max_prompt_length=2; raise it"):
        PromptDataset.load(file, tokenizer(), PromptsConfig(max_prompt_length=2, filter_overlong_prompts=True))


@given(st.integers(0, 30), st.integers(1, 20), st.sampled_from(["left", "right", "middle"]))
def test_truncation_keeps_order_and_length(num: int, most: int, how: Truncation) -> None:
    ids = list(range(num))
    kept = truncate(ids, most, how)
    assert len(kept) == min(num, most)
    head = {"left": 0, "right": len(kept), "middle": len(kept) if num <= most else most // 2}[how]
    assert kept[:head] == ids[:head]
    assert kept[head:] == ids[num - (len(kept) - head) :]


def test_max_samples_takes_the_first_or_draws_by_seed(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [row(i) for i in range(30)])

    def numbers(**settings: Any) -> list[int]:
        return [r.extra_info["index"] for r in PromptDataset.load(file, tokenizer(), **settings)]

    assert numbers(max_samples=4) == [0, 1, 2, 3]
    drawn = numbers(max_samples=10, seed=1)
    assert drawn == numbers(max_samples=10, seed=1) == sorted(set(drawn))
    assert len(drawn) == 10
    assert drawn != numbers(max_samples=10, seed=2)
    assert numbers(max_samples=99) == numbers(max_samples=-1) == list(range(30))


@pytest.mark.parametrize("settings", [{"truncation": "both"}, {"max_prompt_length": 0}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        PromptsConfig(**settings)


CUSTOM = """
class Doubling:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.files, self.factor, self.size = data_files, config.apply_chat_template_kwargs["factor"], max_samples

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if i == 3:
            return "not a row"
        return {"raw_prompt": [{"role": "user", "content": f"{i}*{self.factor}="}], "data_source": self.files[0],
                "reward_model": {"style": "rule", "ground_truth": i * self.factor}, "dummy_tensor": None}

class Nothing:
    def __init__(self, **_): pass
"""


def test_a_custom_dataset_class_is_read_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "custom.py"
    path.write_text(CUSTOM)

    def source(name: str, max_samples: int = 3) -> Any:
        custom = CustomClassConfig(path=str(path), name=name)
        config = PromptsConfig(custom_cls=custom, apply_chat_template_kwargs={"factor": 7})
        return configured_source(config, ["my.bin"], tokenizer=tokenizer(), max_samples=max_samples)

    prompts = PromptDataset.load(source("Doubling"), tokenizer())
    assert texts(prompts) == [f"<|user|>{i}*7=<|end|><|assistant|>" for i in range(3)]
    assert [r.reward_model["ground_truth"] for r in prompts] == [0, 7, 14]
    assert prompts.data_sources == ("my.bin",)
    with pytest.raises(DataError, match="Doubling, row 3: a row must be a dict"):
        PromptDataset.load(source("Doubling", max_samples=4), tokenizer())
    with pytest.raises(ConfigError, match="has no __len__"):
        source("Nothing")
    with pytest.raises(ConfigError, match="does not define it"):
        source("Missing")


def test_text_without_a_template_gets_the_tokenizers_own_special_tokens() -> None:
    own = build_tokenizer()
    own.chat_template = None
    assert encode_prompt(own, "ab", template_kwargs={}) == own("ab")["input_ids"]
    assert (
        encode_prompt(own, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], template_kwargs={})
        == own("a\nb")["input_ids"]
    )
