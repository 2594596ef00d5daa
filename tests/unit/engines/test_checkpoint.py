"""Checkpoints that are damaged, of another model, or cannot be written; what is saved and what is exported."""

import json
import os
import resource
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlsys.config.schema.model import CheckpointConfig, ModelConfig, OptimConfig, PolicyModelConfig, ShardConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.checkpoint import copied_to_host, verify
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.utils.errors import CheckpointError
from tests.ranks import run_ranks
from tests.unit.engines.common import MODEL, random_model, same, small_engine, small_rows, train, whole


def save_once(path: Path) -> None:
    engine = small_engine()
    train(engine)
    engine.save(path, "resume")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step_1"
    run_ranks(2, save_once, path)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "step_1")


def test_a_checkpoint_has_verls_names_and_no_pickle(saved: Path) -> None:
    per_rank = [f"{kind}_world_size_2_rank_{rank}.safetensors" for kind in ("model", "optim") for rank in (0, 1)]
    extra = [f"extra_state_world_size_2_rank_{rank}.json" for rank in (0, 1)]
    others = ["fsdp_config.json", "huggingface", "manifest.json", "tensors.json"]
    assert sorted(os.listdir(saved)) == sorted([*per_rank, *extra, *others])
    assert os.listdir(saved.parent) == ["step_1"]
    assert verify(saved)["world_size"] == 2


def test_each_rank_writes_its_own_rows_once(saved: Path) -> None:
    sizes = [sum(t.numel() for t in load_file(file).values()) for file in sorted(saved.glob("model_*"))]
    numel = sum(p.numel() for p in AutoModelForCausalLM.from_config(small_config()).parameters())
    assert sum(sizes) == numel
    assert abs(sizes[0] - sizes[1]) <= 0.01 * numel


def small_config() -> Any:
    from rlsys.models.hf import read_config

    return read_config(random_model())


def load_fails(path: Path) -> tuple[str, bool]:
    engine = small_engine()
    before = whole(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load(path)
    return str(caught.value), same(before, whole(engine))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    "file",
    [
        "model_world_size_2_rank_1.safetensors",
        "optim_world_size_2_rank_0.safetensors",
        "tensors.json",
        "extra_state_world_size_2_rank_1.json",
    ],
)
@pytest.mark.parametrize(("damage", "expected"), [(flip, "corrupted"), (cut, "truncated"), (Path.unlink, "missing")])
def test_a_damaged_file_is_named_on_every_rank_and_nothing_is_loaded(
    copied: Path, file: str, damage: Callable[[Path], None], expected: str
) -> None:
    damage(copied / file)
    for message, untouched in run_ranks(2, load_fails, copied):
        assert file in message
        assert expected in message
        assert untouched


@pytest.mark.parametrize("text", [None, "{", '{"format": 99, "files": {}}'])
def test_a_checkpoint_without_a_good_manifest_is_not_one(copied: Path, text: str | None) -> None:
    (copied / "manifest.json").unlink() if text is None else (copied / "manifest.json").write_text(text)
    ((message, untouched),) = run_ranks(1, load_fails, copied)
    assert str(copied) in message
    assert untouched


def load_other(path: Path, override: dict[str, Any], options: dict[str, Any]) -> str:
    engine = small_engine(random_model({**MODEL, **override}), **options)
    with pytest.raises(CheckpointError) as caught:
        engine.load(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "options", "expected"),
    [
        ({"num_hidden_layers": 3}, {}, "missing (model.model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, {}, "not this model's (model.model.layers.1.input_layernorm.weight"),
        ({"vocab_size": 44}, {}, "model.model.embed_tokens.weight is (40, 16), this model's (44, 16)"),
        ({"tie_word_embeddings": False}, {}, "missing (model.lm_head.weight"),
        ({}, {"head": "scalar"}, "missing (model.score.bias"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_tensors(
    saved: Path, override: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    (message,) = run_ranks(1, load_other, saved, override, options)
    assert expected in message


def save_fails(path: Path, limit_bytes: int | None) -> str:
    engine = small_engine()
    train(engine)
    if limit_bytes is not None and dist.get_rank() == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    with pytest.raises(CheckpointError) as caught:
        engine.save(path, "resume")
    with pytest.raises(CheckpointError):
        engine.save(path, "export") if limit_bytes is None else engine.save(path, "resume")
    return str(caught.value)


def test_a_full_disk_is_reported_on_every_rank_and_leaves_the_old_checkpoint(copied: Path) -> None:
    for message in run_ranks(2, save_fails, copied, 5000):
        assert f"cannot save {copied}: rank 1:" in message
        assert "File too large" in message
    verify(copied)
    assert os.listdir(copied.parent) == ["step_1"]


def saved_beside(folder: Path) -> list[bool]:
    """Save, and twice beside a step from the same state; whether tensors are let go when they are copied."""
    import rlsys.engines.checkpoint as checkpoint

    make, write, copied = checkpoint.copied_to_host, checkpoint.write_files, list[Any]()

    def make_slowly(tensors: Any) -> Any:
        time.sleep(0.5)
        copied.extend(map(weakref.ref, tensors))
        return make(tensors)

    def write_later(*args: Any) -> Any:
        let_go.append(all(ref() is None for ref in copied))
        return write(*args)

    engine, let_go = small_engine(), list[bool]()
    train(engine)
    engine.save(folder / "first", "resume")
    checkpoint.copied_to_host, checkpoint.write_files = make_slowly, write_later  # pyrefly: ignore
    for name in ("second", "third"):
        saving = engine.begin_save(folder / name)
        train(engine)
        saving.finish()
        engine.load(folder / "first")
    return let_go


def test_what_is_saved_beside_a_step_is_of_the_moment_before_it(tmp_path: Path) -> None:
    assert run_ranks(2, saved_beside, tmp_path) == [[True, True]] * 2
    first, *others = [verify(tmp_path / name)["files"] for name in ("first", "second", "third")]
    assert others == [first, first]


def test_copies_on_the_host_are_whole_and_apart_from_what_is_trained() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 5), (), (0, 2), (40, 4))]
    tensors += [torch.randn(4, 6, generator=generator).bfloat16()[:, 1:3], torch.tensor([True, False])]
    copies = copied_to_host(tensors)
    assert all(one.equal(other) and one.dtype == other.dtype for one, other in zip(copies, tensors, strict=True))
    assert not any(copy.requires_grad or not copy.is_contiguous() for copy in copies)
    assert not {copy.data_ptr() for copy in copies if copy.nbytes} & {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize("place", ["/sys/no-such/step_1", "/dev/null/step_1"])
def test_a_folder_that_cannot_be_written_is_reported(place: str) -> None:
    for message in run_ranks(2, save_fails, Path(place), None):
        assert f"cannot save {place}: rank 0:" in message


def killed_while_saving(path: Path) -> None:
    engine = small_engine()
    engine.save(path, "resume")
    train(engine)
    import rlsys.engines.checkpoint as checkpoint

    checkpoint.commit_dir = lambda staging, final: os._exit(1)
    engine.save(path, "resume")


def test_a_run_killed_before_the_rename_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, killed_while_saving, path)
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_1.tmp"]
    assert verify(path)["num_updates"] == 0
    run_ranks(1, save_once, path)
    assert os.listdir(tmp_path) == ["step_1"]
    assert verify(path)["num_updates"] == 1


def learning_rates(path: Path, optim: OptimConfig, updates: int, count: int) -> list[float]:
    engine = small_engine(optim=optim, total_steps=8, updates_per_step=updates)
    if path.exists():
        engine.load(path)
    rates = [train(engine).lr for _ in range(count)]
    engine.save(path, "resume")
    return rates


def test_a_run_that_is_resumed_with_other_mini_batches_has_its_place_in_the_schedule(tmp_path: Path) -> None:
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear")
    (first,) = run_ranks(1, learning_rates, tmp_path / "step", optim, 2, 4)
    (resumed,) = run_ranks(1, learning_rates, tmp_path / "step", optim, 4, 4)
    assert [1 - rate for rate in first] == pytest.approx([0, 1 / 16, 2 / 16, 3 / 16])
    assert [1 - rate for rate in resumed] == pytest.approx([8 / 32, 9 / 32, 10 / 32, 11 / 32])


def partial(path: Path, contents: list[str]) -> tuple[bool, int, bool]:
    engine = small_engine(checkpoint=CheckpointConfig(load_contents=contents))
    before = whole(engine)
    torch.manual_seed(0)
    engine.load(path)
    assert engine.optimizer is not None
    draws = torch.rand(2)
    torch.manual_seed(0)
    return same(before, whole(engine)), engine.optimizer.num_steps, bool(torch.equal(draws, torch.rand(2)))


@pytest.mark.parametrize(
    ("contents", "expected"),
    [(["model"], (False, 0, True)), (["optimizer"], (True, 1, True)), (["extra"], (True, 0, False))],
)
def test_only_the_contents_asked_for_are_loaded(saved: Path, contents: list[str], expected: Any) -> None:
    assert run_ranks(2, partial, saved, contents) == [expected, expected]


def save_some(path: Path) -> list[str]:
    engine = small_engine(checkpoint=CheckpointConfig(save_contents=("model",), load_contents=("model", "optimizer")))
    engine.save(path, "resume")
    with pytest.raises(CheckpointError, match=r"without optimizer; set checkpoint\.load_contents=\[model\]"):
        engine.load(path)
    return sorted(os.listdir(path))


def test_only_the_contents_asked_for_are_saved(tmp_path: Path) -> None:
    (files,) = run_ranks(1, save_some, tmp_path / "s")
    model = "model_world_size_1_rank_0.safetensors"
    assert files == ["fsdp_config.json", "huggingface", "manifest.json", model, "tensors.json"]


def frozen(path: Path) -> bool:
    model_only = CheckpointConfig(load_contents=("model",))
    engine = FSDPEngine(random_model(), TrainEngineOptions(checkpoint=model_only), shard=ShardConfig(seed=9))
    with pytest.raises(ValueError, match="no optimizer"):
        engine.optim_step()
    engine.load(path)
    trained = small_engine()
    trained.load(path)
    return same(whole(engine), whole(trained))


def test_an_engine_without_an_optimizer_takes_the_model_of_a_checkpoint(saved: Path) -> None:
    assert run_ranks(1, frozen, saved) == [True]


def export_and_reload(place: Path, head: str) -> dict[str, torch.Tensor]:
    options: dict[str, Any] = {"outputs": ("log_probs",) if head == "lm" else ("values",)}
    engine = small_engine(head=head, optim=OptimConfig(lr=1e-2), grad_clip=0.0)
    train(engine, **options)
    engine.save(place / "model", "export")
    engine.save(place / "model", "export")
    again = small_engine(ModelConfig(path=str(place / "model")), head=head)
    assert same(whole(engine), whole(again))
    return engine.forward(small_rows(), options["outputs"])


@pytest.mark.parametrize(("world", "file_bytes"), [(1, 5 * 10**9), (2, 3000)])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_an_export_is_loaded_by_transformers_with_the_same_numbers(
    tmp_path: Path, head: str, world: int, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.engines.base.EXPORT_FILE_BYTES", file_bytes)
    outputs = run_ranks(world, export_and_reload, tmp_path, head)[0]
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == (world == 2)
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
    model, report = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = small_rows().batch["input_ids"]
    logits = model.eval()(ids).logits[:, 2:-1]
    if head == "lm":
        expected = torch.log_softmax(logits, -1).gather(2, ids[:, 3:, None])[..., 0]
    else:
        expected = logits[..., 0]
    torch.testing.assert_close(outputs["log_probs" if head == "lm" else "values"], expected, rtol=1e-5, atol=1e-5)
    assert os.listdir(tmp_path) == ["model"]


def export_of(source: str, place: Path) -> None:
    small_engine(ModelConfig(path=source)).save(place, "export")


def test_an_export_carries_the_tokenizer_files_of_its_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(small_config()).save_pretrained(source)
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "vocab.json"]
    for name in [*kept, "README.md"]:
        (source / name).write_text(json.dumps({"from": name}))
    run_ranks(1, export_of, str(source), tmp_path / "model")
    assert sorted(os.listdir(tmp_path / "model")) == sorted([*kept, "config.json", "model.safetensors"])
    assert json.loads((tmp_path / "model" / "vocab.json").read_text()) == {"from": "vocab.json"}


def save_bfloat16(source: str, tokenizer: str, place: Path) -> None:
    model = PolicyModelConfig(path=source, tokenizer_path=tokenizer, custom_chat_template="{{ mine }}")
    engine = small_engine(model)
    engine.save(place / "actor", "resume")
    engine.save(place / "exported", "export")


def test_a_checkpoint_says_which_model_and_tokenizer_it_is_of_and_keeps_the_type_of_the_model(tmp_path: Path) -> None:
    source, tokenizer = tmp_path / "source", tmp_path / "tokenizer"
    AutoModelForCausalLM.from_config(small_config()).bfloat16().save_pretrained(source)
    for folder in (source, tokenizer):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer_config.json").write_text(json.dumps({"from": folder.name}))
    run_ranks(1, save_bfloat16, str(source), str(tokenizer), tmp_path)
    for folder in (tmp_path / "actor" / "huggingface", tmp_path / "exported"):
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert (folder / "generation_config.json").is_file()
        assert json.loads((folder / "tokenizer_config.json").read_text()) == {"from": "tokenizer"}
        assert (folder / "chat_template.jinja").read_text() == "{{ mine }}"
    assert {t.dtype for t in load_file(tmp_path / "exported" / "model.safetensors").values()} == {torch.bfloat16}
    assert {t.dtype for t in load_file(next((tmp_path / "actor").glob("model_*"))).values()} == {torch.float32}
