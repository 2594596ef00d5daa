"""The public names that verl's examples, recipes and API pages import: where each is here, or what to use instead."""

import importlib
import re
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from rlsys import verl
from rlsys.config import PPOConfig
from rlsys.data.start_assets import START_MODEL
from rlsys.protocol import DataProto

PAGE = (Path(__file__).resolve().parents[2] / "docs/coming_from_verl.md").read_text()
SAME = (
    "DataProto",
    "protocol.DataProto",
    "protocol.DataProtoFuture",
    "protocol.pad_dataproto_to_divisor",
    "protocol.unpad_dataproto",
    "protocol.all_gather_data_proto",
    "single_controller.Worker",
    "single_controller.WorkerGroup",
    "single_controller.ResourcePool",
    "single_controller.ClassWithInitArgs",
    "single_controller.base.decorator.register",
    "single_controller.base.decorator.Dispatch",
    "single_controller.base.decorator.Execute",
    "single_controller.base.decorator.collect_all_to_all",
    "single_controller.base.decorator.dispatch_one_to_all",
    "single_controller.base.decorator.make_nd_compute_dataproto_dispatch_fn",
    "single_controller.ray.RayWorkerGroup",
    "single_controller.ray.RayClassWithInitArgs",
    "single_controller.ray.RayResourcePool",
    "single_controller.ray.create_colocated_worker_cls",
    "single_controller.ray.base.merge_resource_pool",
)
"""Below rlsys as below verl."""
PLACES = {
    "trainer.main_ppo.main": "trainer.main_ppo.main",
    "trainer.main_ppo.run_ppo": "trainer.build.train",
    "trainer.main_ppo.create_rl_dataset": "rlsys.data.dataset.PromptDataset",
    "trainer.main_ppo.create_rl_sampler": "rlsys.data.rl_sampler.create_rl_sampler",
    "trainer.ppo.ray_trainer.RayPPOTrainer": "trainer.ppo.RayPPOTrainer",
    "trainer.ppo.ray_trainer.ResourcePoolManager": "rlsys.single_controller.ray.ResourcePoolManager",
    "trainer.ppo.ray_trainer.Role": "trainer.groups.Role",
    "trainer.ppo.ray_trainer.apply_kl_penalty": "rlsys.algorithms.stages.apply_kl_penalty",
    "trainer.ppo.ray_trainer.compute_advantage": "rlsys.algorithms.stages.compute_advantage",
    "trainer.ppo.ray_trainer.compute_response_mask": "rlsys.verl.compute_response_mask",
    "trainer.ppo.utils.need_critic": "rlsys.verl.need_critic",
    "trainer.ppo.utils.need_reference_policy": "rlsys.verl.need_reference_policy",
    "trainer.ppo.utils.need_reward_model": "rlsys.verl.need_reward_model",
    "trainer.ppo.metric_utils.compute_data_metrics": "rlsys.telemetry.metrics.data_metrics",
    "trainer.ppo.metric_utils.compute_timing_metrics": "rlsys.telemetry.metrics.timing_metrics",
    "trainer.ppo.metric_utils.compute_throughout_metrics": "rlsys.telemetry.metrics.throughput_metrics",
    "trainer.ppo.metric_utils.process_validation_metrics": "rlsys.telemetry.validation_metrics.validation_metrics",
    "trainer.ppo.core_algos.AdvantageEstimator": "rlsys.verl.AdvantageEstimator",
    "trainer.ppo.core_algos.register_adv_est": "rlsys.algorithms.core_algos.register_adv_est",
    "trainer.ppo.core_algos.register_policy_loss": "rlsys.algorithms.core_algos.register_policy_loss",
    "trainer.ppo.core_algos.get_adv_estimator_fn": "rlsys.algorithms.core_algos.get_adv_estimator_fn",
    "trainer.ppo.core_algos.get_policy_loss_fn": "rlsys.algorithms.core_algos.get_policy_loss_fn",
    "trainer.ppo.core_algos.agg_loss": "rlsys.algorithms.core_algos.agg_loss",
    "trainer.ppo.core_algos.kl_penalty": "rlsys.algorithms.core_algos.kl_penalty",
    "trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_add_to_batch": (
        "rlsys.algorithms.stages.apply_rollout_correction"
    ),
    "trainer.ppo.reward.load_reward_manager": "rlsys.rewards.manager.build_reward_manager",
    "workers.reward_manager.NaiveRewardManager": "rlsys.rewards.manager.PoolRewardManager",
    "workers.reward_manager.DAPORewardManager": "rlsys.rewards.manager.PoolRewardManager",
    "workers.fsdp_workers.CriticWorker": "workers.critic.CriticWorker",
    "workers.fsdp_workers.RewardModelWorker": "workers.reward_model.RewardModelWorker",
    "workers.config.RolloutConfig": "rlsys.config.schema.rollout.RolloutConfig",
    "workers.sharding_manager.base.BaseShardingManager": "rlsys.weights.sharding_manager.ShardingManager",
    "utils.hf_tokenizer": "rlsys.verl.hf_tokenizer",
    "utils.hdfs_io.copy": "rlsys.verl.copy",
    "utils.hdfs_io.makedirs": "rlsys.verl.makedirs",
    "utils.fs.copy_to_local": "rlsys.data.remote.local_copy",
    "utils.tracking.Tracking": "rlsys.telemetry.trackers.Tracking",
    "utils.metric.reduce_metrics": "rlsys.telemetry.metrics.reduce_metrics",
    "utils.py_functional.append_to_dict": "rlsys.verl.append_to_dict",
    "utils.profiler.marked_timer": "rlsys.verl.marked_timer",
    "utils.flops_counter.FlopsCounter": "rlsys.models.flops.ModelFlops",
    "utils.model.compute_position_id_with_mask": "rlsys.verl.compute_position_id_with_mask",
    "utils.seqlen_balancing.get_seqlen_balanced_partitions": "rlsys.verl.get_seqlen_balanced_partitions",
    "utils.seqlen_balancing.rearrange_micro_batches": "rlsys.batching.micro_batches",
    "utils.seqlen_balancing.log_seqlen_unbalance": "rlsys.batching.seqlen_metrics",
    "utils.torch_functional.masked_mean": "rlsys.algorithms.masked.masked_mean",
    "utils.torch_functional.masked_whiten": "rlsys.algorithms.masked.masked_whiten",
    "utils.import_utils.load_extern_type": "rlsys.utils.plugins.load_from_file",
    "utils.checkpoint.checkpoint_manager.find_latest_ckpt_path": "rlsys.utils.run_folders.step_folder",
    "utils.dataset.rl_dataset.RLHFDataset": "rlsys.data.dataset.PromptDataset",
    "utils.dataset.rl_dataset.collate_fn": "rlsys.data.collate.collate_prompts",
    "utils.reward_score.default_compute_score": "rlsys.verl.default_compute_score",
    "utils.reward_score.gsm8k.compute_score": "rlsys.rewards.gsm8k.compute_score",
    "utils.reward_score.math_reward.compute_score": "rlsys.rewards.math.compute_score",
    "utils.reward_score.math_reward.last_boxed_only_string": "rlsys.rewards.math.last_boxed",
    "utils.reward_score.math_dapo.compute_score": "rlsys.rewards.math.compute_score_dapo",
    "tools.base_tool.BaseTool": "rlsys.agent.tools.BaseTool",
    "tools.base_tool.ToolResponse": "rlsys.verl.ToolResponse",
    "tools.function_tool.function_tool": "rlsys.agent.tools.function_tool",
    "interactions.base.BaseInteraction": "rlsys.agent.interactions.BaseInteraction",
    "experimental.dataset.sampler.AbstractCurriculumSampler": "rlsys.data.rl_sampler.AbstractCurriculumSampler",
    "model_merger": "rlsys.model_merger",
}
ABSENT = (
    "ActorRolloutRefWorker",
    "AgentLoopBase",
    "FSDPCheckpointManager",
    "OpenAIFunctionToolSchema",
    "RolloutSkip",
    "TaskRunner",
    "ValidationGenerationsLogger",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss",
    "compute_reward",
    "get_custom_reward_fn",
    "get_device_name",
    "hf_processor",
    "log_gpu_memory_usage",
    "omega_conf_to_dataclass",
    "rollout_trace_op",
    "validate_config",
    "ulysses_pad_and_slice_inputs",
)
"""What the page lists with what to use instead."""


def value_at_path(path: str) -> object:
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", SAME)
def test_names_of_verl_are_below_rlsys(name: str) -> None:
    assert value_at_path(f"rlsys.{name}")


@pytest.mark.parametrize("name", PLACES)
def test_names_of_verl_under_another_path_are_listed_and_there(name: str) -> None:
    place = PLACES[name]
    assert value_at_path(place)
    module, _, own = place.rpartition(".")
    words = (
        r"\| `verl\.",
        rf"[`.]{name.rpartition('.')[2]}`",
        re.escape(module),
        rf"[`.]{own}`|the same|{re.escape(place)}`",
    )
    assert any(all(re.search(word, row) for word in words) for row in PAGE.splitlines()), (
        f"no row has {name} and {place}"
    )


@pytest.mark.parametrize("name", ABSENT)
def test_names_that_do_not_exist_are_listed_with_what_to_use(name: str) -> None:
    assert re.search(rf"^\| `{name}`[^|]*\| [^|]+ \|$", PAGE, re.MULTILINE)


def test_faces_do_what_verls_functions_do() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0]])
    batch = DataProto.from_dict({"attention_mask": mask, "responses": torch.zeros(1, 2)})
    assert verl.compute_response_mask(batch).tolist() == [[1, 0]]
    assert verl.compute_position_id_with_mask(mask).tolist() == [[0, 0, 1, 2, 0]]
    assert verl.get_seqlen_balanced_partitions([5, 1, 4, 2], 2, equal_size=True) == [[0, 1], [2, 3]]
    assert verl.AdvantageEstimator.GRPO == "grpo"
    assert verl.AdvantageEstimator("gae") is verl.AdvantageEstimator.GAE
    lists: dict[str, list[int]] = {}
    for values in ({"a": 1}, {"a": [2, 3]}):
        verl.append_to_dict(lists, values)
    seconds: dict[str, float] = {}
    for _ in range(2):
        with verl.marked_timer("gen", seconds, color="red"):
            np.sort(np.arange(10))
    assert (lists, seconds.keys(), seconds["gen"] > 0) == ({"a": [1, 2, 3]}, {"gen"}, True)
    config = PPOConfig()
    needs = (verl.need_critic(config), verl.need_reference_policy(config), verl.need_reward_model(config))
    assert needs == (True, False, False)
    assert verl.default_compute_score("openai/gsm8k", "#### 4", "4")["score"] == 1.0


def test_rows_are_copied_as_by_verls_preparation_scripts(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.parquet").write_bytes(b"PAR1")
    target = f"memory://{tmp_path}"
    verl.makedirs(target)
    verl.copy(src=str(tmp_path / "gsm8k"), dst=target)
    assert fsspec.filesystem("memory").cat(f"{tmp_path}/gsm8k/train.parquet") == b"PAR1"


def test_a_tools_response_is_its_text_and_a_tokenizer_pads() -> None:
    assert verl.ToolResponse(text="4").text == "4"
    assert verl.hf_tokenizer(str(START_MODEL)).pad_token is not None
