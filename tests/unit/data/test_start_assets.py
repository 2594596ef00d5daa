"""Start assets: tokenizer, model shape, rows, and building them once however many ask."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlsys.data.start_assets import (
    EOS,
    PAD,
    UNSURE,
    Problem,
    WarmUp,
    build_tokenizer,
    content_hash,
    ensure_start_assets,
    model_config,
    prompt_rows,
    split_problems,
    warm_up_rows,
)

SETTINGS = WarmUp(num_steps=2, num_unsure_steps=1, batch_size=3)


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    for text in ("12+34=46", "tab\t, newline\n, é 日本 🙂", "", " leading and trailing "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [tokenizer.decode([t]) for t in tokenizer("12+3")["input_ids"]] == ["1", "2", "+", "3"]
    assert len(tokenizer) == model_config()["vocab_size"]
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, EOS)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (model_config()["pad_token_id"], model_config()["eos_token_id"]) == (0, 1)


def test_the_tokenizer_is_the_same_after_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    again = AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [{"role": "system", "content": "don't 123 é\n\n  x"}, {"role": "user", "content": "7*8="}]
    texts = [
        t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # pyrefly: ignore[missing-attribute]
        for t in (tokenizer, again)
    ]
    assert texts[0] == texts[1] == "<|system|>don't 123 é\n\n  x<|end|><|user|>7*8=<|end|><|assistant|>"
    assert tokenizer(texts[0])["input_ids"] == again(texts[0])["input_ids"]
    assert (again.pad_token_id, again.eos_token_id, again.padding_side) == (0, 1, "left")


def test_the_model_has_about_a_million_parameters() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = model_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert 0.8e6 < model.num_parameters() < 3e6


def test_problems_and_their_answers() -> None:
    assert [Problem(12, o, 5).answer for o in ("+", "-", "*")] == [17, 7, 60]  # pyrefly: ignore[bad-argument-type]
    assert Problem(3, "-", 9).question("symbols") == "3-9="
    assert Problem(3, "*", 9).question("words") == "Calculate 3 * 9. Give only the result as your final answer."


def test_nothing_of_the_held_out_problems_is_trained_on() -> None:
    train, test = split_problems()
    assert len({*map(str, train + test)}) == len(train + test) == 438
    questions = {row["prompt"][0]["content"] for row in prompt_rows("test")}
    assert len(questions) == len(test)
    warm = warm_up_rows(WarmUp(num_steps=2000, num_unsure_steps=0, batch_size=1))
    assert len(warm) == 2000
    assert not questions & {row["messages"][0]["content"] for row in warm}
    assert not questions & {row["prompt"][0]["content"] for row in prompt_rows("train")}
    few = WarmUp(num_steps=10, num_unsure_steps=0, batch_size=1)
    assert warm_up_rows(few) == warm[:10] != warm_up_rows(replace(few, seed=1))


def test_only_the_last_texts_hedge() -> None:
    rows = warm_up_rows(WarmUp(num_steps=60, num_unsure_steps=30, unsure=0.4, batch_size=10))
    answers = [row["messages"][1]["content"] for row in rows]
    assert len(answers) == 600
    assert UNSURE not in answers[:300]
    assert 90 < answers[300:].count(UNSURE) < 150
    assert set(answers[300:]) - {UNSURE}


def warm_up(model: Path, sft_file: Path, settings: WarmUp) -> None:
    assert pq.read_table(sft_file).num_rows == settings.num_steps * settings.batch_size
    assert json.loads((model / "config.json").read_text())["model_type"] == "qwen2"
    with (model.parents[1] / "calls").open("a") as calls:
        calls.write("x")
    (model / "model.safetensors").write_bytes(b"weights")


def test_assets_are_made_once_and_kept(tmp_path: Path) -> None:
    assets = ensure_start_assets(warm_up, folder=tmp_path, settings=SETTINGS)
    assert (assets.model / "tokenizer.json").is_file()
    assert (assets.model / "model.safetensors").read_bytes() == b"weights"
    assert pq.read_table(assets.train_file).num_rows == len(prompt_rows("train"))
    row = pq.read_table(assets.val_file).to_pylist()[0]
    assert row["data_source"] == "rlsys/arithmetic"
    assert ensure_start_assets(warm_up, folder=tmp_path, settings=SETTINGS) == assets
    assert (tmp_path / "start" / "calls").read_text() == "x"
    other = ensure_start_assets(
        warm_up, folder=tmp_path, settings=WarmUp(num_steps=1, num_unsure_steps=1, batch_size=3)
    )
    assert other.model != assets.model
    assert content_hash(SETTINGS) == assets.model.parent.name


def test_a_failed_or_interrupted_build_leaves_nothing_that_counts(tmp_path: Path) -> None:
    def fail(model: Path, sft_file: Path, settings: WarmUp) -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        ensure_start_assets(fail, folder=tmp_path, settings=SETTINGS)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        ensure_start_assets(lambda *_: None, folder=tmp_path, settings=SETTINGS)
    assert not (tmp_path / "start" / content_hash(SETTINGS)).exists()
    assert (tmp_path / "start" / f"{content_hash(SETTINGS)}.tmp" / "model").is_dir()
    assets = ensure_start_assets(warm_up, folder=tmp_path, settings=SETTINGS)
    assert (assets.model / "model.safetensors").is_file()


def ask(folder: str) -> None:
    ensure_start_assets(warm_up, folder=Path(folder), settings=SETTINGS)


def test_of_many_processes_one_makes_the_assets(tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context("fork")
    askers = [context.Process(target=ask, args=(str(tmp_path),)) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    assert [asker.exitcode for asker in askers] == [0] * 4
    assert (tmp_path / "start" / "calls").read_text() == "x"
