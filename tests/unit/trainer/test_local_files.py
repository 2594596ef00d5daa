"""Where the folder of a model comes from: a model directory, or the weights of a checkpoint, which are merged once."""

import runpy
import shlex
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlsys.config import EvalConfig, load_config
from rlsys.config.checks.files import model_facts
from rlsys.config.schema.model import ModelConfig, ServedModelConfig
from rlsys.model_merger.__main__ import main
from rlsys.utils.errors import CheckpointError, ConfigError
from tests.ranks import run_ranks
from tests.unit.engines.common import MODEL, small_engine
from trainer.local_files import load_tokenizer, local_model, with_local_files

ROOT = Path(__file__).resolve().parents[3]


def save(source: str, place: Path) -> None:
    small_engine(ModelConfig(path=source)).save(place, "resume")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a checkpoint of step 7, of a model in bfloat16."""
    from transformers import AutoConfig

    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL)).bfloat16().save_pretrained(source)
    run_ranks(1, save, str(source), tmp_path / "run" / "global_step_7" / "actor")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7\n")
    return tmp_path / "run"


@pytest.mark.parametrize("inside", ["", "global_step_7", "global_step_7/actor"])
def test_a_run_and_its_checkpoints_are_models(run: Path, inside: str, tmp_path: Path) -> None:
    assert main(["merge", "--local_dir", str(run / inside), "--target_dir", str(tmp_path / "merged")]) == 0
    assert model_facts(run / inside)["hidden_size"] == MODEL["hidden_size"]
    folder = Path(local_model(str(run / inside)))
    expected = load_file(tmp_path / "source" / "model.safetensors")
    for place in (tmp_path / "merged", folder):
        weights = load_file(place / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(w.dtype == torch.bfloat16 and torch.equal(w, expected[name]) for name, w in weights.items())
        AutoModelForCausalLM.from_pretrained(place)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert local_model(str(run / inside)) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_an_evaluation_takes_a_run(run: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "data_source": "x", "reward_model": {"ground_truth": "2"}}\n')
    given = [f"actor_rollout_ref.model.path={run}", f"data.val_files={rows}"]
    config = load_config(given, EvalConfig)
    assert with_local_files(config).actor_rollout_ref.model.path == str(run / "global_step_7/actor/huggingface")
    named = load_config([f"actor_rollout_ref.model.path={tmp_path / 'source'}", given[1]], EvalConfig)
    assert with_local_files(named) == named


def test_rows_at_an_address_are_copied_to_the_cache_and_again_where_they_change(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSYS_CACHE", str(tmp_path / "cache"))
    files, url = fsspec.filesystem("memory"), "memory://bucket/rows.jsonl"
    config = load_config([f"actor_rollout_ref.model.path={run}", f"data.val_files={url}"], EvalConfig)
    with pytest.raises(ConfigError, match=r"memory://bucket/rows\.jsonl cannot be read.*FileNotFoundError"):
        with_local_files(config)
    copies = []
    for text in ("first", "first", "second"):
        if not files.exists(url) or files.cat(url) != text.encode():
            files.pipe(url, text.encode())
        (copy,) = with_local_files(config).data.val_files or ()
        assert Path(copy).read_text() == text
        copies.append(copy)
    assert copies[0] == copies[1] != copies[2]
    assert len(list((tmp_path / "cache").rglob("*.jsonl"))) == 2


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: .* give a run's folder, global_step_N"):
        local_model(str(tmp_path))


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_a_tokenizer_that_cannot_be_read_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match=f"the tokenizer in {tmp_path} is missing or cannot be read: "):
        load_tokenizer(ServedModelConfig(path=str(tmp_path)))


def test_the_commands_of_the_readme_make_a_model_of_a_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "README.md").read_text().partition("## Use what you trained")[2]
    lines = section.partition("```bash\n")[2].partition("```")[0].splitlines()
    merge, load = (shlex.split(line.replace("checkpoints/rlsys/run", str(run))) for line in lines[:2])
    monkeypatch.chdir(tmp_path)
    assert merge[:3] == ["python", "-m", "rlsys.model_merger"]
    assert main(merge[3:]) == 0
    assert load[:2] == ["python", "-c"]
    (tmp_path / "load.py").write_text(load[2])
    runpy.run_path(str(tmp_path / "load.py"))
    assert [line.split()[0] for line in lines[2:]] == ["vllm"]
