"""Make a small vision-language model that reads pictures of shapes, and rows to train it on.

    python scripts/vision_model.py --out data/vision

OUT/model is a Qwen2.5-VL of about a million parameters with its tokenizer and image processor, OUT/train.parquet and
OUT/test.parquet are questions about shapes (scripts/shapes.py). The warm-up takes two or three minutes on one core:
the vision tower learns to give each cell of a picture the embeddings of the words for what is in it, then the language
model learns to answer. In the last steps most answers are "?": the model can do more than it says, and reinforcement
learning has something to bring out.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.telemetry.progress import Progress
from scripts.prepare_data import make_split, write_rows
from scripts.shapes import CELLS, COLOURS, FORMS, KINDS, SMALL, Shape, ask, picture, pictures

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = [PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNSURE, NOTHING = "?", "nothing"
HIDDEN, HEADS = 128, 4
EMBEDDING_STD = 0.5


@dataclass(frozen=True)
class WarmUp:
    """How the model is warmed up; in the last `num_unsure_steps` a share `unsure` of the answers is "?"."""

    num_pictures: int = 6000
    num_tower_steps: int = 200
    tower_batch_size: int = 64
    num_steps: int = 500
    num_unsure_steps: int = 70
    unsure: float = 0.65
    batch_size: int = 48
    questions_per_picture: int = 4
    lr: float = 2e-3
    seed: int = 0


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Bytes, the words of the texts, and Qwen's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL with random weights: those of its usual start are too small for a model this narrow."""
    ids: Any = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS // 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "bos_token_id": None,
            "eos_token_id": ids[END],
            "pad_token_id": ids[PAD],
        },
        vision_config={
            "depth": 2,
            "hidden_size": HIDDEN // 2,
            "intermediate_size": HIDDEN,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, EMBEDDING_STD if "embed_tokens" in name else weight[0].numel() ** -0.5)
    model.generation_config.update(eos_token_id=ids[END], pad_token_id=ids[PAD], bos_token_id=None)
    return model


class Lessons:
    """Pictures, processed once, and what is asked about them."""

    def __init__(self, settings: WarmUp) -> None:
        self.settings = settings
        self.shapes = list(islice(pictures(seed=settings.seed), settings.num_pictures))
        words = [NOTHING, "small large", *COLOURS, *FORMS] * 500
        asked = [text for shapes in self.shapes[:3000] for kind in KINDS for text in ask(shapes, kind)]
        self.tokenizer = build_tokenizer([*words, *asked])
        self.image_processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=224 * 224)
        made = self.image_processor(images=[picture(shapes) for shapes in self.shapes], return_tensors="pt")
        self.grids = made["image_grid_thw"]
        self.pixels = made["pixel_values"].view(len(self.shapes), -1, made["pixel_values"].shape[-1])
        self.random = Random(settings.seed)
        self._encode = cache(self.tokenizer.encode)

    def token_of(self, word: str) -> int:
        """The id of a word that is one token."""
        (token_id,) = self.tokenizer.encode(word)
        return token_id

    def names(self, shapes: Sequence[Shape], embeddings: Tensor) -> Tensor:
        """What the tower is to say of each cell: the sum of the embeddings of its words (CELLS, H)."""
        cells = [embeddings[self.token_of(NOTHING)]] * CELLS
        for shape in shapes:
            size = "small" if shape.radius <= max(SMALL) else "large"
            cells[shape.cell] = embeddings[[self.token_of(word) for word in (shape.colour, shape.form, size)]].sum(0)
        return torch.stack(cells)

    def conversation(self, shapes: Sequence[Shape], *, unsure: float) -> tuple[list[int], list[int]]:
        """The ids of a conversation about a picture, and those that are learnt, -100 for the others."""
        encode, ids, labels = self._encode, list[int](), list[int]()
        before = f"{START}user\n{VISION_START}{IMAGE * CELLS}{VISION_END}"
        for kind in self.random.choices(KINDS, weights=(4, 2, 1), k=self.settings.questions_per_picture):
            question, answer = ask(self.random.sample(shapes, len(shapes)), kind)
            given = encode(f"{before}{question}{END}\n{START}assistant\n")
            learnt = encode(f"{UNSURE if self.random.random() < unsure else answer}{END}")
            ids += given + learnt
            labels += [-100] * len(given) + learnt
            before = f"\n{START}user\n"
        return ids, labels


def warm_up(settings: WarmUp, folder: Path) -> None:
    """Make the model and leave it in `folder`. On one thread: its matrices are too small to share."""
    torch.set_num_threads(1)
    lessons = Lessons(settings)
    model = build_model(lessons.tokenizer, seed=settings.seed)
    title, num_steps = "making the vision model", settings.num_tower_steps + settings.num_steps
    with Progress(total_steps=num_steps, title=title) as progress:
        for step, _ in enumerate(train_tower(model, lessons), 1):
            progress.step_done(step)
        for step, _ in enumerate(train_language_model(model, lessons), settings.num_tower_steps + 1):
            progress.step_done(step)
    for part in (model, lessons.tokenizer, lessons.image_processor):
        part.save_pretrained(str(folder))


def features_of(model: Any, lessons: Lessons, rows: Sequence[int]) -> Tensor:
    """What the tower makes of pictures: (rows, CELLS, H)."""
    made = model.model.visual(lessons.pixels[rows].flatten(0, 1), grid_thw=lessons.grids[rows])
    return made.pooler_output.view(len(rows), CELLS, HIDDEN)


def train_tower(model: Any, lessons: Lessons) -> Any:
    """Teach the tower the words of each cell; yields after each step."""
    settings, size = lessons.settings, lessons.settings.tower_batch_size
    embeddings = model.model.language_model.embed_tokens.weight.detach().clone()
    wanted = torch.stack([lessons.names(shapes, embeddings) for shapes in lessons.shapes])
    optimizer = torch.optim.AdamW(model.model.visual.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(settings.num_tower_steps):
        rows = [(step * size + row) % len(wanted) for row in range(size)]
        set_lr(optimizer, settings.lr, step, warmup=20, decay=settings.num_tower_steps, total=settings.num_tower_steps)
        take_step(optimizer, mse_loss(features_of(model, lessons, rows), wanted[rows]))
        yield


def train_language_model(model: Any, lessons: Lessons) -> Any:
    """Teach the language model to answer what the tower shows; yields after each step."""
    settings, size = lessons.settings, lessons.settings.batch_size
    with torch.no_grad():
        parts = [range(len(lessons.shapes))[start : start + 300] for start in range(0, len(lessons.shapes), 300)]
        features = torch.cat([features_of(model, lessons, list(rows)) for rows in parts])
    weights = [weight for name, weight in model.named_parameters() if "visual" not in name]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(settings.num_steps):
        set_lr(optimizer, settings.lr, step, warmup=50, decay=settings.num_steps * 2 // 5, total=settings.num_steps)
        rows = [(step * size + row) % len(features) for row in range(size)]
        unsure = settings.unsure if step >= settings.num_steps - settings.num_unsure_steps else 0.0
        texts = [lessons.conversation(lessons.shapes[row], unsure=unsure) for row in rows]
        take_step(optimizer, answer_loss(model, texts, features[rows], lessons.grids[rows]))
        yield


def answer_loss(model: Any, texts: Sequence[tuple[list[int], list[int]]], features: Tensor, grids: Tensor) -> Tensor:
    """The mean negative log-likelihood of the answers, behind pictures whose features are given."""
    padded = [torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(text[part]) for text in texts], batch_first=True, padding_value=(0, -100)[part]
    ) for part in (0, 1)]  # fmt: skip
    ids, labels = padded
    is_image = ids == model.config.image_token_id
    embedded = model.model.language_model.embed_tokens(ids).masked_scatter(is_image[..., None], features)
    positions, _ = model.model.get_rope_index(ids, is_image.int(), grids)
    hidden = model.model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)[0]
    learnt = labels[:, 1:] >= 0
    return cross_entropy(model.lm_head(hidden[:, :-1][learnt]), labels[:, 1:][learnt])


def set_lr(optimizer: torch.optim.Optimizer, lr: float, step: int, *, warmup: int, decay: int, total: int) -> None:
    """Rise within `warmup` steps, fall to 0 within the last `decay`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * min((step + 1) / warmup, 1.0, (total - step) / decay)


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Follow the clipped gradient of a loss."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make everything in a folder beside, then put it in place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--train", type=int, default=2048, metavar="N", help="rows to train on")
    parser.add_argument("--val", type=int, default=120, metavar="M", help="rows to validate on")
    options = parser.parse_args(arguments)
    out = options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as beside:
        new = Path(beside) / out.name
        warm_up(WarmUp(), new / "model")
        train, val = make_split("shapes", num_train=options.train, num_val=options.val, seed=1)
        write_rows(new / "train.parquet", train)
        write_rows(new / "test.parquet", val)
        shutil.rmtree(out, ignore_errors=True)
        new.rename(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
