"""Frozen models other than the actor's: another reference, a teacher, a reward model with a tokenizer of its own."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from tests.e2e.conftest import Toy, with_model
from trainer import main_ppo

TEACHER = "distillation.teacher_models.teacher_model.model_path="
LOSS = "distillation.distillation_loss."


def run(toy: Toy, out: Path, *overrides: str) -> list[dict[str, Any]]:
    common = ("trainer.backend=local", f"reward.custom_reward_function.path={toy.grader}")
    assert main_ppo.main(toy.overrides(out, *common, *overrides)) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def teacher(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's model, surer of itself: its logits are 30 times as large."""
    folder = tmp_path_factory.mktemp("teacher")
    model: Any = AutoModelForCausalLM.from_pretrained(toy.model)
    model.model.norm.weight.data *= 30
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy.model).save_pretrained(str(folder))
    return folder


def test_a_reference_of_its_own_is_scored_also_beside_adapters(toy: Toy, teacher: Path, tmp_path: Path) -> None:
    overrides = ("actor_rollout_ref.actor.use_kl_loss=true", "trainer.total_training_steps=1")
    itself = run(toy, tmp_path / "itself", *overrides, "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    own = (f"actor_rollout_ref.ref.model.path={teacher}", "actor_rollout_ref.model.lora_rank=2")
    other = run(toy, tmp_path / "other", *overrides, *own)
    assert itself[-1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert other[-1]["actor/kl_loss"] > 0.1


@pytest.mark.parametrize(
    ("steps", "how"),
    [
        (40, ("loss_mode=k1", "use_policy_gradient=true")),
        (30, ("loss_mode=k3",)),
        (12, ("loss_mode=forward_kl_topk", "topk=4", "log_prob_min_clamp=-10.0")),
    ],
)
def test_a_student_comes_closer_to_its_teacher(
    toy: Toy, teacher: Path, tmp_path: Path, steps: int, how: tuple[str, ...]
) -> None:
    settings = (f"{LOSS}{setting}" for setting in (*how, "use_task_rewards=false"))
    long = (f"trainer.total_training_steps={steps}", "actor_rollout_ref.actor.optim.lr=1e-2")
    lines = run(toy, tmp_path, "distillation.enabled=true", f"{TEACHER}{teacher}", *settings, *long)
    divergence = [line["distillation/loss"] for line in lines]
    assert sum(divergence[-5:]) < 0.9 * sum(divergence[:5])
    if "topk=4" in how:
        assert 0 < lines[-1]["distillation/student_mass"] <= 1 + 1e-6
        assert lines[0]["distillation/student_mass"] < lines[-1]["distillation/student_mass"]


def test_each_of_several_teachers_scores_its_own_rows(
    toy: Toy, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the rows are taught by the student itself, from which it does not differ."""
    rows = [json.loads(line) for line in toy.train.read_text().splitlines()]
    mixed = tmp_path / "mixed.jsonl"
    named = [row | {"data_source": ("own", "other")[number % 2]} for number, row in enumerate(rows)]
    mixed.write_text("\n".join(map(json.dumps, named)))
    common = (f"data.train_files={mixed}", "data.shuffle=false", "trainer.total_training_steps=1")
    common += ("distillation.enabled=true", "actor_rollout_ref.actor.ppo_mini_batch_size=8", f"{LOSS}loss_mode=abs")
    alone = run(toy, tmp_path / "alone", *common, f"{TEACHER}{teacher}")
    both = [f"+distillation.teacher_models.{name}.key={name}" for name in ("own", "other")]
    both += [f"+distillation.teacher_models.own.model_path={toy.model}", "distillation.nnodes=1"]
    both += [f"+distillation.teacher_models.other.model_path={teacher}", "distillation.n_gpus_per_node=1"]
    pair = run(toy, tmp_path / "pair", *common, *both)
    assert pair[-1]["distillation/abs_loss"] == pytest.approx(alone[-1]["distillation/abs_loss"] / 2, rel=0.3)
    unknown = [setting.replace("key=own", "key=mine") for setting in both]
    graded = f"reward.custom_reward_function.path={toy.grader}"
    assert main_ppo.main(toy.overrides(tmp_path / "unknown", "trainer.backend=local", graded, *common, *unknown)) == 1
    assert "no teacher has the key 'own'" in capsys.readouterr().err


@pytest.mark.slow
def test_teachers_on_their_own_processes_have_megatron_sizes_of_their_own(
    toy: Toy, teacher: Path, tmp_path: Path, ray_cluster: object
) -> None:
    """The student is split over two ranks, the teacher is whole on one of its own; the loss is that of one process."""
    common = ("distillation.enabled=true", f"{TEACHER}{teacher}", "trainer.total_training_steps=1")
    common += ("actor_rollout_ref.actor.ppo_mini_batch_size=8", f"{LOSS}loss_mode=abs", "data.shuffle=false")
    alone = run(toy, tmp_path / "alone", *common)
    own = ("distillation.nnodes=1", "distillation.n_gpus_per_node=1", "trainer.n_gpus_per_node=2")
    own += ("trainer.backend=ray", "trainer.device=cpu")
    sizes = ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",)
    sizes += ("distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1",)
    split = run(toy, tmp_path / "split", "--config-name=ppo_megatron_trainer", *common, *own, *sizes)
    assert split[-1]["distillation/abs_loss"] == pytest.approx(alone[-1]["distillation/abs_loss"], rel=1e-4)


def words(folder: Path) -> Path:
    """A tokenizer of whole characters in another order, with a chat template of its own."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", "?", *"0987654321+-*= "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "?"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)
    made.save_pretrained(str(folder))
    return folder


def test_a_reward_model_with_another_tokenizer_is_named_and_reads_text(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = words(Path(copytree(toy.judge, tmp_path / "judge")))
    model = ("reward.reward_model.enable=true", f"reward.reward_model.model_path={judge}")
    more = ("trainer.backend=local", "trainer.total_training_steps=1")
    assert main_ppo.main(toy.overrides(tmp_path / "wrong", *more, *model)) == 2
    assert f"set reward.reward_model.input_tokenizer={toy.model}" in capsys.readouterr().err
    run(toy, tmp_path / "right", *more, *model, f"reward.reward_model.input_tokenizer={toy.model}")


JUDGE = """
import aiohttp
async def compute_score(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    question = "?" * (40 if extra_info["index"] % 8 == 0 else 4) + ground_truth
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 3, "temperature": 0.0}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{reward_router_address}/v1/chat/completions", json=body) as answer:
            text = (await answer.json())["choices"][0]["message"]["content"]
    return {"score": len(text) / 3, "answer_tokens": len(reward_model_tokenizer.encode(text, add_special_tokens=False))}
"""


def judged(toy: Toy, folder: Path, judge: Path, engine: str, *overrides: str) -> list[dict[str, Any]]:
    """The lines of two steps that an engine's judge graded; it refused the questions that are too long."""
    (folder / "judge.py").write_text(JUDGE)
    common = [f"reward.custom_reward_function.path={folder}/judge.py", "data.shuffle=false"]
    common += ["reward.reward_model.enable=true", f"reward.reward_model.model_path={judge}"]
    common += [f"reward.reward_model.rollout.name={engine}", "reward.reward_model.rollout.prompt_length=32"]
    argv = toy.overrides(folder / "out", *common, "trainer.total_training_steps=2", *overrides)
    assert main_ppo.main(argv) == 0
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/errors"] for line in lines] == [4, 4]
    return lines


OWN_POOL = ("reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=1")


@pytest.mark.parametrize("pool", [(), OWN_POOL], ids=["colocated", "own"])
def test_a_reward_function_asks_a_judge_that_the_job_serves(toy: Toy, tmp_path: Path, pool: tuple[str, ...]) -> None:
    lines = judged(toy, tmp_path, toy.model, "hf", "trainer.backend=local", *pool)
    assert lines[0]["critic/rewards/mean"] > 0


@pytest.mark.parametrize(
    "engine", [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)
def test_vllm_and_sglang_serve_the_judge_of_a_job(toy: Toy, tmp_path: Path, engine: str) -> None:
    pytest.importorskip(engine)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    judge = with_model(toy, tmp_path / "judge", Qwen2Config, num_hidden_layers=2, **sizes).model
    overrides = ("trainer.backend=ray", "trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=2", *OWN_POOL)
    lines = judged(toy, tmp_path, judge, engine, *overrides)
    assert max(line["critic/rewards/max"] for line in lines) > 0
