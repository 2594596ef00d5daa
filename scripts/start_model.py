"""Make the model that training starts from when nothing else is given, and its rows: rlsys/data/start.

    python scripts/start_model.py --out rlsys/data/start

A tokenizer of single bytes and a Qwen2-shaped model of about a million parameters, warmed up on arithmetic texts by our
own SFT engine, on one thread in about a minute. The last of these texts answer "?" now and then.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.config.schema.model import ModelConfig, OptimConfig, ShardConfig
from rlsys.data.collate import collate_texts
from rlsys.data.cursor import permutation
from rlsys.data.supervised import load_texts
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.roles.lm import LMEngine
from rlsys.telemetry.progress import Progress
from scripts.prepare_data import Problem, prompt_row, write_rows

PAD, EOS, UNSURE = "<|pad|>", "<|end|>", "?"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_HELD_OUT = 60


@dataclass(frozen=True)
class WarmUp:
    """How the model is warmed up: one pass over `warm_up_rows`; the learning rate rises, then falls to 0 linearly.

    In the last `num_unsure_steps` a share `unsure` of the texts answers "?".
    """

    num_steps: int = 800
    num_unsure_steps: int = 100
    unsure: float = 0.4
    batch_size: int = 16
    lr: float = 1e-3
    warmup_steps: int = 30
    schedule: Literal["constant", "cosine", "linear"] = "linear"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    grad_clip: float = 1.0
    seed: int = 0


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, the special tokens of the chat template, and nothing learnt."""
    special = [PAD, EOS, *(f"<|{role}|>" for role in ROLES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*special, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model_config() -> dict[str, Any]:
    """The model as a transformers config.json: Qwen2, float32, tied embeddings."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 262,
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """Problems to train on, and NUM_HELD_OUT that neither the warm-up nor the training sees.

    Sums and differences of numbers up to 12, products of digits: 438 problems in all.
    """
    problems = [Problem(a, o, b) for o in ("+", "-") for a in range(13) for b in range(13)]
    problems += [Problem(a, "*", b) for a in range(10) for b in range(10)]
    order = permutation(len(problems), seed=7, epoch=0).tolist()
    return [problems[i] for i in order[NUM_HELD_OUT:]], [problems[i] for i in order[:NUM_HELD_OUT]]


def prompt_rows(split: Literal["train", "test"]) -> list[dict[str, Any]]:
    """verl rows of a split, for the prompts of the default run."""
    problems = split_problems()[split == "test"]
    return [prompt_row(p, index=i, split=split, style="symbols") for i, p in enumerate(problems)]


def warm_up_rows(settings: WarmUp) -> list[dict[str, Any]]:
    """The texts of one warm-up: conversations out of the training problems, in passes of changing order.

    Of those of the last `num_unsure_steps` a share `unsure`, drawn by `seed`, answers UNSURE instead.
    """
    train, _ = split_problems()
    random = Random(settings.seed)
    num_rows, num_unsure = (steps * settings.batch_size for steps in (settings.num_steps, settings.num_unsure_steps))
    rows: list[dict[str, Any]] = []
    for epoch in range(-(-num_rows // len(train))):
        for i in permutation(len(train), seed=settings.seed, epoch=epoch).tolist()[: num_rows - len(rows)]:
            hedges = len(rows) >= num_rows - num_unsure and random.random() < settings.unsure
            question = {"role": "user", "content": train[i].question("symbols")}
            answer = {"role": "assistant", "content": UNSURE if hedges else str(train[i].answer)}
            rows.append({"messages": [question, answer]})
    return rows


def make(folder: Path, settings: WarmUp) -> None:
    """Fill `folder` with model/, train.parquet and test.parquet."""
    model = folder / "model"
    build_tokenizer().save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps(model_config(), indent=2))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    write_rows(folder / "train.parquet", prompt_rows("train"))
    write_rows(folder / "test.parquet", prompt_rows("test"))
    with TemporaryDirectory() as beside:
        write_rows(Path(beside) / "sft.parquet", warm_up_rows(settings))
        warm_up(model, Path(beside) / "sft.parquet", settings)


def warm_up(folder: Path, texts: Path, settings: WarmUp) -> None:
    """SFT of the model that `folder` describes on the texts, one pass in their order; the weights are left there.

    On one thread: the matrices are too small to share, and threads that wait for each other cost more than they help.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = load_texts(str(texts), tokenizer)
    torch.set_num_threads(1)
    engine = FSDPEngine(
        ModelConfig(override_config=model_config(), enable_gradient_checkpointing=False),
        TrainEngineOptions(
            optim=OptimConfig(
                lr=settings.lr,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                lr_warmup_steps=settings.warmup_steps,
                lr_scheduler_type=settings.schedule,
            ),
            grad_clip=settings.grad_clip,
            total_steps=settings.num_steps,
            training=MicroBatches(rows=settings.batch_size),
        ),
        shard=ShardConfig(seed=settings.seed),
    )
    role = LMEngine(engine)
    with Progress(total_steps=settings.num_steps, title="making the start model") as progress:
        for step in range(settings.num_steps):
            chosen = [rows[step * settings.batch_size + i] for i in range(settings.batch_size)]
            role.train_batch(collate_texts(chosen, pad_token_id=tokenizer.pad_token_id))
            progress.step_done(step + 1)
    with TemporaryDirectory(dir=folder) as beside:
        engine.save(Path(beside) / "export", "export")
        (Path(beside) / "export" / "model.safetensors").rename(folder / "model.safetensors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make everything in a folder beside, then put it in place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    out = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as beside:
        make(Path(beside) / "start", WarmUp())
        shutil.rmtree(out, ignore_errors=True)
        (Path(beside) / "start").rename(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
