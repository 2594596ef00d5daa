"""The start assets: what the package holds is what scripts/start_model.py makes."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from rlsys.data.start_assets import HELD_OUT_ROWS, START_MODEL, TRAIN_ROWS
from scripts import start_model
from scripts.prepare_data import Problem
from scripts.start_model import EOS, PAD, UNSURE, WarmUp, model_config, prompt_rows, split_problems, warm_up_rows
from tests.start_tokenizer import build_tokenizer


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    for text in ("12+34=46", "tab\t, newline\n, é 日本 🙂", "", " leading and trailing "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [tokenizer.decode([t]) for t in tokenizer("12+3")["input_ids"]] == ["1", "2", "+", "3"]
    assert len(tokenizer) == model_config()["vocab_size"]
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.padding_side) == (PAD, EOS, "left")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (model_config()["pad_token_id"], model_config()["eos_token_id"]) == (0, 1)


def test_the_chat_template_marks_the_roles() -> None:
    tokenizer = AutoTokenizer.from_pretrained(START_MODEL)
    messages = [{"role": "system", "content": "don't 123 é\n\n  x"}, {"role": "user", "content": "7*8="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>don't 123 é\n\n  x<|end|><|user|>7*8=<|end|><|assistant|>"


def test_the_model_has_about_a_million_parameters() -> None:
    with safe_open(START_MODEL / "model.safetensors", framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    assert 0.8e6 < sum(a * (b[0] if b else 1) for a, *b in shapes) < 1e6


def test_problems_and_their_answers() -> None:
    assert [Problem(12, o, 5).answer for o in ("+", "-", "*")] == [17, 7, 60]  # pyrefly: ignore[bad-argument-type]
    assert Problem(3, "-", 9).question("symbols") == "3-9="
    assert Problem(3, "*", 9).question("words") == "Calculate 3 * 9. Give only the result as your final answer."


def test_nothing_of_the_held_out_problems_is_trained_on() -> None:
    train, test = split_problems()
    assert len({*map(str, train + test)}) == len(train + test) == 438
    questions = {row["prompt"][0]["content"] for row in pq.read_table(HELD_OUT_ROWS).to_pylist()}
    assert len(questions) == len(test)
    warm = warm_up_rows(WarmUp(num_steps=2000, num_unsure_steps=0, batch_size=1))
    assert len(warm) == 2000
    assert not questions & {row["messages"][0]["content"] for row in warm}
    assert not questions & {row["prompt"][0]["content"] for row in pq.read_table(TRAIN_ROWS).to_pylist()}
    few = WarmUp(num_steps=10, num_unsure_steps=0, batch_size=1)
    assert warm_up_rows(few) == warm[:10] != warm_up_rows(replace(few, seed=1))


def test_only_the_last_texts_hedge() -> None:
    rows = warm_up_rows(WarmUp(num_steps=60, num_unsure_steps=30, unsure=0.4, batch_size=10))
    answers = [row["messages"][1]["content"] for row in rows]
    assert len(answers) == 600
    assert UNSURE not in answers[:300]
    assert 90 < answers[300:].count(UNSURE) < 150
    assert set(answers[300:]) - {UNSURE}


def test_the_script_makes_what_the_package_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_model, "WarmUp", lambda: WarmUp(num_steps=2, num_unsure_steps=1, batch_size=3))
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "old").touch()
    assert start_model.main(["--out", str(tmp_path / "start")]) == 0
    made, held = tmp_path / "start", START_MODEL.parent
    assert sorted(p.relative_to(made) for p in made.rglob("*")) == sorted(p.relative_to(held) for p in held.rglob("*"))
    for name in ("train.parquet", "test.parquet"):
        assert pq.read_table(made / name).to_pylist() == pq.read_table(held / name).to_pylist()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((made / "model" / name).read_text()) == json.loads((held / "model" / name).read_text())
    assert prompt_rows("test") == pq.read_table(HELD_OUT_ROWS).to_pylist()
    files = [safe_open(folder / "model" / "model.safetensors", framework="pt") for folder in (made, held)]
    shapes = [{name: file.get_slice(name).get_shape() for name in file.keys()} for file in files]  # noqa: SIM118
    assert shapes[0] == shapes[1]
