"""The merger: the same bits through ranks and back, real FSDP checkpoints, and one clear error for what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.model_merger.__main__ import main
from rlsys.model_merger.convert import compare, merge, split
from rlsys.model_merger.formats import SplitLayout
from rlsys.models.megatron.family import family_of
from rlsys.utils.errors import CheckpointError, ConfigError
from tests.ranks import run_ranks
from tests.unit.models.megatron_families.tiny import CONFIGS, read_config, write_model

LAYOUTS = {
    "one": SplitLayout(),
    "TP2 PP2 in two chunks": SplitLayout(tp=2, pp=2, vp=2),
    "TP4 EP4 ETP2": SplitLayout(tp=4, ep=4, etp=2),
    "PP3 uneven EP2, Transformer Engine": SplitLayout(
        pp=3, first_layers=1, last_layers=2, ep=2, transformer_engine=True
    ),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name in ("qwen2-tied", "qwen3-moe", "mixtral", "deepseek-v3", "deepseek-v3-full-q"):
        paths[name] = tmp_path_factory.mktemp("models") / name
        write_model(name, paths[name])
    add_mtp(paths["deepseek-v3"])
    (paths["qwen2-tied"] / "tokenizer_config.json").write_text("{}")
    return paths


def add_mtp(path: Path) -> None:
    """Give a model directory the tensors of one layer for multi-token prediction."""
    config = {**read_config(path), "num_nextn_predict_layers": 1}
    config.pop("num_mtp_layers", None)
    (path / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(5)
    shapes = family_of(config).carried(config)
    save_file({n: torch.randn(s, generator=draw) for n, s in shapes.items()}, path / "model-mtp.safetensors")


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def layout_for(name: str, layout: SplitLayout) -> SplitLayout:
    return layout if "qwen2" not in name else SplitLayout(**{**vars(layout), "ep": 1})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_through_ranks_and_back(layout: str, models: dict[str, Path], tmp_path: Path) -> None:
    for name, model in models.items():
        ranks, back = tmp_path / f"{name}-ranks", tmp_path / f"{name}-back"
        split(model, ranks, layout_for(name, LAYOUTS[layout]))
        assert compare(ranks, model) == []
        merge(ranks, back, file_bytes=100_000)
        assert same(tensors_of(back), tensors_of(model)), name
        assert compare(back, model) == []
        assert read_config(back) == read_config(model)


@pytest.mark.parametrize("name", ["glm4-moe", "gemma3", "gpt-oss", "mistral", "qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_newer_families_have_the_same_bits_after_split_and_merge(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "model")
    experts = 2 if "moe" in name or name in ("gpt-oss", "qwen3-next") else 1
    split(tmp_path / "model", tmp_path / "ranks", SplitLayout(tp=2, pp=2, ep=experts, etp=1))
    merge(tmp_path / "ranks", tmp_path / "back", file_bytes=100_000)
    assert same(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "model"))
    assert compare(tmp_path / "ranks", tmp_path / "model") == []


def test_a_merged_model_is_loaded_by_transformers(models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    split(models["qwen3-moe"], tmp_path / "ranks", LAYOUTS["TP4 EP4 ETP2"])
    merge(tmp_path / "ranks", tmp_path / "back", file_bytes=20_000)
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        old, new = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
            for path in (models["qwen3-moe"], tmp_path / "back")
        )
    assert torch.equal(old, new)


def test_a_critic_goes_through_ranks_and_back(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    settings = {k: v for k, v in CONFIGS["qwen2-tied"].items() if k != "model_type"}
    config = AutoConfig.for_model("qwen2", **settings, num_labels=1)
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path / "critic")
    split(tmp_path / "critic", tmp_path / "ranks", SplitLayout(tp=2, pp=2, head="value"))
    last = load_file(tmp_path / "ranks" / "tp_001_pp_001.safetensors")
    assert last["0.output_layer.weight"].shape == (1, 32)
    merge(tmp_path / "ranks", tmp_path / "back")
    assert same(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "critic"))


def test_types_that_one_megatron_tensor_cannot_hold_are_reported(models: dict[str, Path], tmp_path: Path) -> None:
    mixed = shutil.copytree(models["qwen2-tied"], tmp_path / "mixed")
    name = "model.layers.1.self_attn.k_proj.weight"
    file = next(file for file in mixed.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].bfloat16()}, file)
    with pytest.raises(CheckpointError, match=f"{name} is BF16 and model.layers.1.self_attn.q_proj.weight F32"):
        split(mixed, tmp_path / "ranks", SplitLayout())
    assert not (tmp_path / "ranks").exists()


def test_a_rank_file_holds_its_part_alone(models: dict[str, Path], tmp_path: Path) -> None:
    split(models["deepseek-v3"], tmp_path / "ranks", SplitLayout(tp=2, pp=2, ep=4))
    files = {file.name: load_file(file) for file in (tmp_path / "ranks").glob("*.safetensors")}
    experts = [name for name in files if name.startswith("experts")]
    assert len(experts) == 8
    assert len(files) == 13
    expected = tensors_of(models["deepseek-v3"])
    down = expected["model.layers.3.mlp.experts.5.down_proj.weight"]
    held = files["experts_ep_002_etp_000_pp_001.safetensors"]
    assert torch.equal(held["0.decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"], down)
    assert all("model.layers.4." in name for name in files["carried.safetensors"])


def save_fsdp(config: dict[str, Any], path: Path, tp_size: int = 1) -> dict[str, Tensor]:
    engine = FSDPEngine(ModelConfig(override_config=config), shard=ShardConfig(seed=3, tensor_parallel_size=tp_size))
    engine.save(path, "resume")
    engine.save(path / "huggingface", "export")
    return {name: tensor.clone() for bucket in engine.weights(1 << 12) for name, tensor in bucket}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_fsdp_checkpoint_becomes_what_the_engine_exports(tp_size: int, tmp_path: Path) -> None:
    run_ranks(2, save_fsdp, {**CONFIGS["qwen2-tied"], "vocab_size": 102}, tmp_path / "actor", tp_size)
    assert main(["merge", "--backend", "fsdp", *_folders(tmp_path / "actor", tmp_path / "hf")]) == 0
    exported = tmp_path / "actor" / "huggingface"
    assert same(tensors_of(tmp_path / "hf"), tensors_of(exported))
    stored = [t for file in (tmp_path / "actor").glob("model_*.safetensors") for t in load_file(file).values()]
    assert sum(t.numel() for t in stored) == sum(t.numel() for t in tensors_of(exported).values()), "stored twice"
    assert read_config(tmp_path / "hf") == read_config(exported)
    assert main(["verify", "--local_dir", str(tmp_path / "actor"), "--hf_model_path", str(exported)]) == 0


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_experts_that_transformers_trains_together_are_stored_one_by_one(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    trained = run_ranks(2, save_fsdp, CONFIGS[name], tmp_path / "actor")[0]
    merge(tmp_path / "actor", tmp_path / "hf", config_dir=models[name], carry_from=models[name])
    merged = tensors_of(tmp_path / "hf")
    assert sum(".experts." in tensor for tensor in trained) > 8 * 3
    assert all(torch.equal(merged[tensor], values) for tensor, values in trained.items())
    assert merged.keys() == tensors_of(models[name]).keys()


def test_tensors_that_training_does_not_hold_come_from_the_base_model(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["deepseek-v3"]
    split(model, tmp_path / "ranks", SplitLayout())
    (tmp_path / "ranks" / "carried.safetensors").unlink()
    merge(tmp_path / "ranks", tmp_path / "without")
    assert not any("layers.4." in name for name in tensors_of(tmp_path / "without"))
    merge(tmp_path / "ranks", tmp_path / "with", carry_from=model)
    assert same(tensors_of(tmp_path / "with"), tensors_of(model))


def test_floats_are_converted_on_demand(models: dict[str, Path], tmp_path: Path) -> None:
    split(models["deepseek-v3"], tmp_path / "ranks", SplitLayout(tp=2))
    assert main(["merge", *_folders(tmp_path / "ranks", tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    old, new = tensors_of(models["deepseek-v3"]), tensors_of(tmp_path / "hf")
    for name, tensor in new.items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, old[name] if kept else old[name].bfloat16())
    assert read_config(tmp_path / "hf")["dtype"] == "bfloat16"


def _folders(source: Path, target: Path) -> list[str]:
    return ["--local_dir", str(source), "--target_dir", str(target)]


FIRST = "tp_000_pp_000.safetensors"
QKV = "0.decoder.layers.0.self_attention.linear_qkv.weight"
NORM = "0.decoder.layers.0.input_layernorm.weight"


def _without(tensors: dict[str, Tensor]) -> None:
    del tensors[QKV]


def _with_another(tensors: dict[str, Tensor]) -> None:
    tensors["0.decoder.layers.9.input_layernorm.weight"] = torch.zeros(32)


def _misshapen(tensors: dict[str, Tensor]) -> None:
    tensors[QKV] = tensors[QKV][:-1].clone()


def _of_another_type(tensors: dict[str, Tensor]) -> None:
    tensors[QKV] = tensors[QKV].bfloat16()


def _another_copy(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] += 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without, f"{FIRST}: 1 tensors are missing \\({QKV}\\)"),
        (_with_another, "1 tensors are not this model's"),
        (_misshapen, r"linear_qkv.weight is \(31, 32\), this model's \(32, 32\)"),
        (_of_another_type, "must be of one type in all files, and is BF16 in tp_000_pp_000.safetensors, F32 in tp_001"),
        (_another_copy, "ranks disagree on 1 tensors: model.layers.0.input_layernorm.weight in tp_000"),
    ],
)
def test_corrupted_rank_files_are_reported(
    spoil: Callable[[dict[str, Tensor]], None], words: str, models: dict[str, Path], tmp_path: Path
) -> None:
    split(models["mixtral"], tmp_path / "ranks", SplitLayout(tp=2))
    file = tmp_path / "ranks" / FIRST
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=words):
        merge(tmp_path / "ranks", tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks"]


@pytest.mark.parametrize("pruned", ["global_step_1", "global_step_2", "global_step_2/actor"])
def test_a_checkpoint_that_was_pruned_is_named_with_those_that_are_there(pruned: str, tmp_path: Path) -> None:
    (tmp_path / "global_step_2" / "critic").mkdir(parents=True)
    for step in (3, 10):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
        (tmp_path / f"global_step_{step}" / "actor" / "tensors.json").touch()
    why = f"max_ckpt_to_keep may have removed its weights; of the steps in {tmp_path} these have theirs: "
    with pytest.raises(CheckpointError, match=f"{why}global_step_10, global_step_3"):
        merge(tmp_path / pruned, tmp_path / "hf")


def test_a_folder_that_is_not_there_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint: there is no such folder; give a run's folder"):
        merge(tmp_path / "checkpoint", tmp_path / "hf")
    (tmp_path / "global_step_2" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_2" / "actor" / "tensors.json").touch()
    with pytest.raises(CheckpointError, match=r"no such folder; of the steps in .* these have theirs: global_step_2"):
        merge(tmp_path / "global_step_2" / "critic", tmp_path / "hf")


def test_a_truncated_file_is_reported(models: dict[str, Path], tmp_path: Path) -> None:
    split(models["mixtral"], tmp_path / "ranks", SplitLayout(tp=2))
    file = tmp_path / "ranks" / FIRST
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{FIRST} cannot be read"):
        merge(tmp_path / "ranks", tmp_path / "hf")
    (tmp_path / "ranks" / FIRST).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST} cannot be read"):
        merge(tmp_path / "ranks", tmp_path / "hf")


def test_a_model_directory_of_another_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    wrong = shutil.copytree(models["qwen3-moe"], tmp_path / "wrong")
    (wrong / "config.json").write_text(json.dumps({**read_config(wrong), "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"tensors are not the model's \(model.layers.3."):
        split(wrong, tmp_path / "ranks", SplitLayout())
    with pytest.raises(ConfigError, match="not divisible by expert_model_parallel_size=3"):
        split(models["qwen3-moe"], tmp_path / "ranks", SplitLayout(ep=3))
    assert not (tmp_path / "ranks").exists()


def test_other_weights_of_the_same_model_differ(models: dict[str, Path], tmp_path: Path) -> None:
    split(models["qwen2-tied"], tmp_path / "ranks", SplitLayout(tp=2))
    other = shutil.copytree(models["qwen2-tied"], tmp_path / "other")
    (other / "model.safetensors.index.json").unlink(missing_ok=True)
    file = min(other.glob("*.safetensors"))
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    (difference,) = compare(tmp_path / "ranks", other)
    assert difference.startswith(f"{name} differs in ")
    assert main(["verify", "--local_dir", str(tmp_path / "ranks"), "--hf_model_path", str(other)]) == 1


def test_errors_at_the_command_line_are_one_line(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", *_folders(tmp_path, tmp_path / "hf")]) == 2
    assert "neither tensors.json nor split.json; give a run's folder, global_step_N" in capsys.readouterr().err
    assert main(["split", "--hf_model_path", str(models["mixtral"]), f"--target_dir={tmp_path}/none", "--ep", "0"]) == 2
    assert capsys.readouterr().err == "--ep=0: must be at least 1\n"
    split(models["mixtral"], tmp_path / "ranks", SplitLayout())
    (tmp_path / "ranks" / "huggingface").rename(tmp_path / "aside")
    assert main(["merge", *_folders(tmp_path / "ranks", tmp_path / "hf")]) == 2
    assert "has no config.json: set --hf_model_config_path" in capsys.readouterr().err
    (tmp_path / "aside").rename(tmp_path / "ranks" / "huggingface")
    assert main(["merge", *_folders(tmp_path / "ranks", tmp_path / "hf"), "--backend", "fsdp"]) == 2
    assert "checkpoint of megatron, not of fsdp" in capsys.readouterr().err
    merge(tmp_path / "ranks", tmp_path / "hf")
    assert main(["merge", *_folders(tmp_path / "ranks", tmp_path / "hf")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["merge", *_folders(tmp_path / "ranks", tmp_path / "hf"), "--overwrite"]) == 0
