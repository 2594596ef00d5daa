"""GRPO in one process, written out: sample, score, compute advantages, forward_backward, optim_step, push weights.

    python scripts/grpo_by_hand.py --model rlsys/data/start/model --steps 20

What `python -m trainer.main_ppo` does with worker groups, a fleet, a reward pool and checkpoints around it, this file
does with one training engine and one rollout engine.
Letters: B prompts, G samples of each, R response tokens, P prompt tokens.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlsys.algorithms.aggregate import agg_loss
from rlsys.config.schema.model import ModelConfig, OptimConfig
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.mesh import ensure_process_group
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossSum
from rlsys.protocol import DataProto
from rlsys.rollout.base import EngineContext
from rlsys.rollout.batch import generate_sequences
from rlsys.rollout.hf.engine import HFRollout
from rlsys.weights.executors.in_process import LocalReshard

B, G, P, R = 32, 8, 16, 8
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TEMPERATURE = 1.0


def questions(step: int) -> list[tuple[str, str]]:
    """B sums of numbers up to 12 with their answers; the same for the same step."""
    numbers = random.Random(step)
    pairs = [(numbers.randint(0, 12), numbers.randint(0, 12)) for _ in range(B)]
    return [(f"{left}+{right}=", str(left + right)) for left, right in pairs]


def prompt_rows(prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, step: int) -> DataProto:
    """Each prompt G times in a row, padded on the left to P tokens; meta_info says how to sample."""
    prompt_ids = torch.full((len(prompts), P), tokenizer.pad_token_id)
    for row, text in enumerate(prompts):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(str(chat), add_special_tokens=False)
        prompt_ids[row, P - len(ids) :] = torch.tensor(ids)
    sampling = {
        "response_length": R,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "temperature": TEMPERATURE,
        "global_steps": step,
    }
    tensors = {"prompts": prompt_ids, "attention_mask": (prompt_ids != tokenizer.pad_token_id).long()}
    return DataProto.from_dict(tensors, meta_info=sampling).repeat(G)


def score(batch: DataProto, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """1 for the right number, else 0: one score for each of the B * G responses."""
    texts = tokenizer.batch_decode(batch.tensors["responses"], skip_special_tokens=True)
    truths = [answer for answer in answers for _ in range(G)]
    return torch.tensor([float(text.strip() == truth) for text, truth in zip(texts, truths, strict=True)])


def group_advantages(scores: Tensor) -> Tensor:
    """Each score against its own group: (score - mean) / (std + 1e-6). Shao et al. 2024, arXiv:2402.03300, eq. 1."""
    groups = scores.view(-1, G)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def policy_loss(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
    """PPO's clipped surrogate as a sum over tokens and their count; the engine divides once, by the global count."""
    mask, advantages = rows["response_mask"], rows["advantages"]
    ratio = torch.exp(outputs["log_probs"] - rows["old_log_probs"])
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    total, count = agg_loss(per_token, mask, "token-mean")
    return LossSum(total, count, {"clip_fraction": (((ratio != clipped) * mask).sum(), count)})


def train_step(
    step: int, engine: FSDPEngine, rollout: HFRollout, weights: LocalReshard, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """One step of GRPO with two optimizer steps; returns its metrics."""
    prompts, answers = zip(*questions(step), strict=True)
    batch = generate_sequences(rollout, prompt_rows(prompts, tokenizer, step=step))

    scores = score(batch, answers, tokenizer)
    advantages = group_advantages(scores)[:, None] * batch.tensors["response_mask"]
    old_log_probs = engine.forward(batch, ["log_probs"], temperature=TEMPERATURE)["log_probs"]
    batch = batch.union(DataProto.from_dict({"advantages": advantages, "old_log_probs": old_log_probs}))

    metrics: dict[str, float] = {}
    for mini_batch in batch.chunk(2):
        metrics = engine.forward_backward(mini_batch, policy_loss, temperature=TEMPERATURE)
        metrics["grad_norm"] = engine.optim_step().grad_norm

    weights.push(step)
    return {"reward": scores.mean().item(), **metrics}


def main() -> None:
    """Parse the command line, train, and write the model where --out says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face folder of the model to train")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, help="where to write the trained model; nothing is written without it")
    args = parser.parse_args()

    ensure_process_group("cpu", timeout_s=60)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    engine = FSDPEngine(
        ModelConfig(path=str(args.model), enable_gradient_checkpointing=False),
        TrainEngineOptions(optim=OptimConfig(lr=args.lr), training=MicroBatches(max_tokens=4096)),
    )
    rollout = HFRollout.from_path(
        str(args.model), GenerationConfig(max_num_seqs=B * G), EngineContext(load_format="dummy")
    )
    weights = LocalReshard(engine, rollout)
    weights.push(0)
    for step in range(1, args.steps + 1):
        metrics = train_step(step, engine, rollout, weights, tokenizer)
        print(f"step {step}: " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()), flush=True)
    if args.out is not None:
        engine.save(args.out, "export")
    rollout.close()


if __name__ == "__main__":
    main()
