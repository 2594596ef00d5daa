"""The small model that training starts from when nothing else is given: made here, in a minute, without a download.

A tokenizer of single bytes, a Qwen2-shaped model of about a million parameters and arithmetic texts to warm it up on.
The last of these texts answer "?" now and then: like a language model that hedges, the start model then knows more than
it says, and reinforcement learning has something to bring out within minutes. Kept in the cache folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock

from rlsys.data.cursor import permutation
from rlsys.utils.atomic import commit_dir, staging_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNSURE = "<|pad|>", "<|end|>", "?"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_HELD_OUT = 60
DATA_SOURCE = "rlsys/arithmetic"
Style = Literal["words", "symbols"]


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


def cache_dir() -> Path:
    """Where made and converted models are kept: RLSYS_CACHE, else rlsys in XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("RLSYS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlsys"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, the special tokens of the chat template, and nothing learnt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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


@dataclass(frozen=True)
class Problem:
    """`left` `operator` `right`."""

    left: int
    operator: Literal["+", "-", "*"]
    right: int

    @property
    def answer(self) -> int:
        if self.operator == "*":
            return self.left * self.right
        return self.left + self.right if self.operator == "+" else self.left - self.right

    def question(self, style: Style) -> str:
        """As a sentence for a language model, or as "12+34="."""
        if style == "symbols":
            return f"{self.left}{self.operator}{self.right}="
        return f"Calculate {self.left} {self.operator} {self.right}. Give only the result as your final answer."


def prompt_row(problem: Problem, *, index: int, split: str, style: Style = "words") -> dict[str, Any]:
    """A row in verl's columns."""
    question = problem.question(style)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": str(problem.answer)},
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


@dataclass(frozen=True)
class StartAssets:
    """Where the assets are stored: a model folder as transformers reads it, and verl rows."""

    model: Path
    train_file: Path
    val_file: Path


def ensure_start_assets(
    warm_up: Callable[[Path, Path, WarmUp], None], *, folder: Path | None = None, settings: WarmUp | None = None
) -> StartAssets:
    """The start assets, made if they are not there yet.

    `warm_up(model folder, SFT file, settings)` trains the randomly initialised model that config.json in the folder
    describes and saves its weights there as model.safetensors. The cache is keyed by everything that the assets are
    made from; several processes may ask at once, one of them makes them.
    """
    settings = settings or WarmUp()
    home = (folder or cache_dir()) / "start" / content_hash(settings)
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(home.with_suffix(".lock")):
        if not home.is_dir():
            _make(home, warm_up, settings)
    return StartAssets(home / "model", home / "train.parquet", home / "test.parquet")


def content_hash(settings: WarmUp) -> str:
    """A name for what these settings and this version of the module make."""
    parts = [asdict(settings), model_config(), CHAT_TEMPLATE, prompt_rows("train"), prompt_rows("test")]
    parts.append(warm_up_rows(settings)[-1000:])
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _make(home: Path, warm_up: Callable[[Path, Path, WarmUp], None], settings: WarmUp) -> None:
    """Make everything in a folder beside and rename it, so that `home` is whole or not there."""
    work = staging_dir(home)
    model = work / "model"
    build_tokenizer().save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps(model_config(), indent=2))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    write_rows(work / "train.parquet", prompt_rows("train"))
    write_rows(work / "test.parquet", prompt_rows("test"))
    write_rows(work / "sft.parquet", warm_up_rows(settings))
    warm_up(model, work / "sft.parquet", settings)
    if not (model / "model.safetensors").is_file():
        raise FileNotFoundError(f"the warm-up left no {model / 'model.safetensors'}")
    commit_dir(work, home)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as parquet, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), beside)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
