"""SFT, reward models and DPO, whole, in this process: they learn, evaluate, export and can be taken up again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.e2e.conftest import Toy
from trainer import main_dpo, main_rm, main_sft

ANSWERS = [(f"{a}+1=", str(a + 1)) for a in range(8)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": right}]} for q, right in ANSWERS
    ],
    "rm": [{"prompt": q, "chosen": right, "rejected": "?"} for q, right in ANSWERS],
}
ROWS["dpo"] = ROWS["dpo on adapters"] = ROWS["rm"]
ROWS["kto"] = [
    {"prompt": q, "completion": right if number % 2 else "?", "label": number % 2 == 1}
    for number, (q, right) in enumerate(ANSWERS)
]
MAINS: dict[str, Callable[[list[str]], int]] = {"sft": main_sft.main, "rm": main_rm.main}
STREAM = ["data.streaming=true", "data.shuffle_buffer_size=3", "trainer.test_freq=2"]
MORE = {"dpo": STREAM, "dpo on adapters": ["model.lora_rank=4"], "kto": ["dpo.loss_type=kto"]}


def run(toy: Toy, job: str, rows: Path, out: Path, num_steps: int, *more: str) -> list[dict[str, Any]]:
    """The metric lines of a run, without what depends on the clock."""
    arguments = [
        "trainer.backend=local",
        f"model.path={toy.model}",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=4",
        "data.micro_batch_size_per_gpu=2",
        "data.max_length=32",
        "optim.lr=1e-3",
        "trainer.test_freq=after_each_epoch",
        f"trainer.total_training_steps={num_steps}",
        f"trainer.default_local_dir={out}",
    ]
    assert MAINS.get(job, main_dpo.main)([*arguments, *MORE.get(job, []), *more]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("timing", "perf/"))} for line in lines]


def test_a_run_whose_workers_do_not_see_its_folder_ends_before_it_trains(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS["sft"])))
    exists, here = Path.exists, iter([True])  # the controller sees the log, the worker, asked next, does not
    monkeypatch.setattr(Path, "exists", lambda path: next(here, False) if path.name == "train.log" else exists(path))
    more = [
        f"model.path={toy.model}",
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.max_length=32",
        "data.train_batch_size=4",
    ]
    assert main_sft.main(["trainer.backend=local", f"trainer.default_local_dir={tmp_path}/out", *more]) == 2
    assert f"trainer.default_local_dir={tmp_path}/out: model rank 0 does not see it" in capsys.readouterr().err


def test_texts_that_are_cut_are_counted(toy: Toy, tmp_path: Path) -> None:
    texts = [{"prompt": "1+1=", "response": "2" * length} for length in (1, 1, 1, 40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
    cut = ["data.messages_key=null", "data.max_length=20", "data.truncation=right", "data.val_files=null"]
    (step,) = run(toy, "sft", tmp_path / "rows.jsonl", tmp_path / "out", 1, *cut)
    assert step["data/truncated_texts"] == 1


@pytest.mark.parametrize("job", ROWS)
def test_a_resumed_run_is_the_uninterrupted_one(
    toy: Toy, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS[job])))
    whole = run(toy, job, rows, tmp_path / "whole", 4, "global_profiler.steps=[2]")
    assert [path.name for path in (tmp_path / "whole" / "profile").iterdir()] == ["step2_train_rank0.json.gz"]
    assert whole[3]["val/loss"] < whole[1]["val/loss"]
    run(toy, job, rows, tmp_path / "cut", 2)
    assert run(toy, job, rows, tmp_path / "cut", 4) == whole
    assert "already complete" not in capsys.readouterr().out
    run(toy, job, rows, tmp_path / "cut", 4)
    printed = capsys.readouterr().out
    assert "This run is already complete (step 4 of 4)." in printed
    assert "  train loss  " in printed
    ends = [tmp_path / name / "global_step_4" / "huggingface" / "model.safetensors" for name in ("whole", "cut")]
    first, second = (load_file(end) for end in ends)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


MEGATRON = ("trainer.backend=ray", "trainer.device=cpu", "engine=megatron", "optim=megatron")
TP2 = (
    *MEGATRON,
    "trainer.n_gpus_per_node=2",
    "engine.tensor_model_parallel_size=2",
    "engine.sequence_parallel=true",
)


@pytest.mark.parametrize(
    ("job", "sizes"),
    [
        pytest.param("sft", MEGATRON, id="sft on a rank"),
        pytest.param("sft", TP2, id="sft on two", marks=pytest.mark.slow),
        pytest.param("rm", TP2, id="rm on two", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_ranks_of_megatron_train_as_one_of_fsdp(
    toy: Toy, job: str, sizes: tuple[str, ...], tmp_path: Path, ray_cluster: object
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS[job])))
    wanted = run(toy, job, rows, tmp_path / "fsdp", 4)
    lines = run(toy, job, rows, tmp_path / "megatron", 4, *sizes)
    for ours, theirs in zip(lines, wanted, strict=True):
        names = [name for name in theirs if name.startswith(("train/", "val/"))]
        assert {name: ours[name] for name in names} == pytest.approx({n: theirs[n] for n in names}, rel=1e-4, abs=1e-6)
    assert all(line["train/grad_norm"] > 0 for line in lines)
    model, reference = (tmp_path / name / "global_step_4/huggingface" for name in ("megatron", "fsdp"))
    saved, expected = (load_file(folder / "model.safetensors") for folder in (model, reference))
    assert all(torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-5) for name, tensor in saved.items())
    kind: Any = AutoModelForCausalLM if job == "sft" else AutoModelForTokenClassification
    loaded = kind.from_pretrained(model).state_dict()
    assert saved.keys() <= loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "rm", "dpo"])
def test_two_tensor_parallel_ranks_of_megatron_resume_bitwise(
    toy: Toy, job: str, tmp_path: Path, ray_cluster: object
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS[job])))
    lines = run(toy, job, rows, tmp_path / "whole", 4, *TP2, "trainer.save_freq=2")
    resume = f"trainer.resume_from_path={tmp_path}/whole/global_step_2"
    resumed = run(toy, job, rows, tmp_path / "rest", 4, *TP2, "trainer.resume_mode=resume_path", resume)
    assert resumed == lines[2:]
    ends = [tmp_path / name / "global_step_4/huggingface/model.safetensors" for name in ("whole", "rest")]
    first, second = (load_file(end) for end in ends)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
