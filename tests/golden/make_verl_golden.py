"""Writes verl_0_9_1.json: verl's own numbers for random cases, in float64, to compare ours with.

Run it with a Python in which verl 0.9.1 can be imported (its own environment): python tests/golden/make_verl_golden.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.config.algorithm import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig, PolicyLossConfig

ROWS, TOKENS, GROUPS = 6, 9, 2


def case(seed: int, *, holes: bool) -> dict[str, torch.Tensor]:
    """Inputs of one case, rounded so that the file holds them exactly."""
    draw = np.random.RandomState(seed)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.round(values, 6), dtype=torch.float64)

    length = draw.randint(2, TOKENS + 1, ROWS)
    mask = (np.arange(TOKENS) < length[:, None]).astype(float)
    if holes:
        mask[:, 1:-1] *= draw.rand(ROWS, TOKENS - 2) > 0.4
    last = np.array([np.flatnonzero(row)[-1] for row in mask])
    rewards = np.zeros((ROWS, TOKENS))
    rewards[np.arange(ROWS), last] = draw.randn(ROWS)
    rewards += 0.05 * draw.randn(ROWS, TOKENS) * mask
    return {
        "group_ids": torch.tensor(draw.permutation(np.arange(ROWS) % GROUPS)),
        "response_mask": torch.tensor(mask),
        "token_level_rewards": tensor(rewards),
        "values": tensor(draw.randn(ROWS, TOKENS) * mask),
        "reward_baselines": tensor(draw.randn(ROWS)),
        "component_scores": tensor(draw.randn(ROWS, 2)),
        "old_log_probs": tensor(-draw.exponential(1.0, (ROWS, TOKENS)) * mask),
        "log_probs": tensor(-draw.exponential(1.0, (ROWS, TOKENS)) * mask),
        "rollout_log_probs": tensor(-draw.exponential(1.0, (ROWS, TOKENS)) * mask),
        "sum_pi_squared": tensor(draw.rand(ROWS, TOKENS) * mask),
        "is_weights": tensor(draw.uniform(0.3, 1.9, (ROWS, TOKENS)) * mask),
        "advantages": tensor(np.repeat(draw.randn(ROWS, 1), TOKENS, axis=1) * mask),
    }


def estimators(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    rewards, mask = inputs["token_level_rewards"], inputs["response_mask"]
    index = inputs["group_ids"].numpy()
    common = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
    energy = {**common, "old_log_probs": inputs["old_log_probs"], "sum_pi_squared": inputs["sum_pi_squared"]}
    algo = AlgoConfig(gamma=0.97)
    no_std = AlgoConfig(norm_adv_by_std_in_grpo=False)
    weighted = AlgoConfig(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[1.0, 0.5])
    parts = {"a": inputs["component_scores"][:, 0].numpy(), "b": inputs["component_scores"][:, 1].numpy()}
    prompts = torch.zeros(ROWS, 1, dtype=torch.int64)
    whole = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    batch = {"prompts": prompts, "attention_mask": torch.cat([prompts + 1, whole], dim=1)}
    get = core_algos.get_adv_estimator_fn
    gae = {k: common[k] for k in ("token_level_rewards", "response_mask")} | {"values": inputs["values"]}
    results = {
        "gae": get("gae")(**gae, gamma=0.97, lam=0.9),
        "gae_undiscounted": get("gae")(**gae, gamma=1.0, lam=1.0),
        "grpo": get("grpo")(**clone(common)),
        "grpo_no_std": get("grpo")(**clone(common), norm_adv_by_std_in_grpo=False),
        "grpo_passk": get("grpo_passk")(**clone(common), config=algo),
        "grpo_passk_no_std": get("grpo_passk")(**clone(common), config=no_std),
        "rloo": get("rloo")(**clone(common)),
        "reinforce_plus_plus": get("reinforce_plus_plus")(**clone(common), config=algo),
        "reinforce_plus_plus_baseline": get("reinforce_plus_plus_baseline")(**clone(common)),
        "remax": get("remax")(**clone(common), reward_baselines=inputs["reward_baselines"]),
        "opo": get("opo")(**clone(common)),
        "gpg": get("gpg")(**clone(common)),
        "gdpo": get("gdpo")(**clone(common), config=weighted, non_tensor_batch=parts, batch=batch),
        "optimal_token_baseline": get("optimal_token_baseline")(**energy),
        "optimal_token_baseline_is": get("optimal_token_baseline")(**energy, rollout_is_weights=inputs["is_weights"]),
        "tir_optimal_token_baseline": get("tir_optimal_token_baseline")(**energy),
        "tir_optimal_token_baseline_tail": get("tir_optimal_token_baseline")(**energy, handle_zero_tail=False),
    }
    return {name: [listed(part * mask) for part in pair] for name, pair in results.items()}


def clone(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def actor_config(loss: dict[str, Any] | None = None, **values: Any) -> ActorConfig:
    covariance = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 2.0, "kl_cov_ratio": 0.2}
    policy = PolicyLossConfig(**{**covariance, **(loss or {})})
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, **values}
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, **settings)


def losses(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """(loss, gradient by token) of every policy loss under every aggregation, and with importance weights."""
    results = {}
    names = ["vanilla", "gspo", "cispo", "sapo", "gpg", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro"]
    modes = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
    for name in names:
        for mode in modes if name == "vanilla" else ["token-mean", "seq-mean-token-mean"]:
            for weights in (None, inputs["is_weights"]):
                results[f"{name}/{mode}/{'plain' if weights is None else 'weighted'}"] = loss(
                    name, inputs, mode, weights, actor_config({"dro_beta": 0.7})
                )
    for kind in ("ppo_clip", "reinforce"):
        correction = {
            "loss_type": kind,
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": "0.6",
        }
        config = actor_config({"rollout_correction": correction})
        config.global_batch_info["batch_num_tokens"] = inputs["response_mask"].sum()
        results[f"bypass_mode/{kind}"] = loss("bypass_mode", inputs, "token-mean", None, config)
    return results


def loss(name: str, inputs: dict[str, torch.Tensor], mode: str, weights: Any, config: ActorConfig) -> list[Any]:
    log_prob = inputs["log_probs"].clone().requires_grad_()
    value, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=inputs["old_log_probs"],
        log_prob=log_prob,
        advantages=inputs["advantages"],
        response_mask=inputs["response_mask"],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    value.backward()
    return [value.item(), listed(log_prob.grad)]


def penalties(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    results = {}
    for kind in ("kl", "abs", "mse", "low_var_kl", "k1+", "k3+"):
        log_prob = inputs["log_probs"].clone().requires_grad_()
        value = core_algos.kl_penalty(log_prob, inputs["old_log_probs"], kind)
        value.sum().backward()
        results[kind] = [listed(value.detach()), listed(log_prob.grad)]
    return results


def value_loss(inputs: dict[str, torch.Tensor]) -> list[Any]:
    vpreds = inputs["sum_pi_squared"].clone().requires_grad_()
    value, clipfrac = core_algos.compute_value_loss(
        vpreds=vpreds,
        returns=inputs["advantages"],
        values=inputs["values"],
        response_mask=inputs["response_mask"],
        cliprange_value=0.3,
    )
    value.backward()
    return [value.item(), listed(vpreds.grad), float(clipfrac)]


def corrections(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    settings = {
        "token_tis": {"rollout_is": "token", "rollout_is_threshold": 1.5},
        "token_mis": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        "sequence_tis": {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
        "token_normalized": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    }
    for mode in sorted(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS):
        settings[mode] = {"rollout_rs": mode, "rollout_rs_threshold": "0.5_2.0" if mode.endswith("k1") else "0.5"}
    settings["two"] = {"rollout_rs": "token_k2,seq_mean_k1", "rollout_rs_threshold": "0.9,0.4_2.5"}
    results = {}
    for name, keys in settings.items():
        weights, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=inputs["old_log_probs"],
            rollout_log_prob=inputs["rollout_log_probs"],
            response_mask=inputs["response_mask"],
            **keys,
        )
        weights = None if weights is None else listed(weights.batch["rollout_is_weights"])
        results[name] = {"settings": keys, "weights": weights, "mask": listed(mask), "metrics": metrics}
    return results


def listed(tensor: torch.Tensor) -> Any:
    return [[float(f"{x:.10g}") for x in row] for row in tensor.double().tolist()]


def main() -> None:
    cases = []
    for seed, holes in ((1, False), (3, True), (4, True)):
        inputs = case(seed, holes=holes)
        cases.append(
            {
                "inputs": {name: tensor.tolist() for name, tensor in inputs.items()},
                "estimators": estimators(inputs),
                "losses": losses(inputs),
                "kl": penalties(inputs),
                "value_loss": value_loss(inputs),
                "corrections": corrections(inputs),
            }
        )
    path = Path(__file__).with_name("verl_0_9_1.json")
    path.write_text(json.dumps({"verl": "0.9.1", "cases": cases}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
