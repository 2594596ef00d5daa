"""Where the rows come from and how they become prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlsys.config.schema.base import (
    Count,
    CountOrOff,
    Flag,
    LocalPath,
    LocalPaths,
    OpenDict,
    Section,
    Seed,
    Text,
    linked,
    open_dict,
)

Truncation = Literal["error", "left", "right", "middle"]
BadRows = Literal["refuse", "skip"]


class CustomClassConfig(Section):
    """A dataset class of yours."""

    path: LocalPath | None = None
    """Python file that holds it."""
    name: Text | None = None
    """Its name: __init__(data_files, tokenizer, config, processor, max_samples)."""


class RowsConfig(Section):
    """Keys of every job: validation rows and how a row is read."""

    val_files: LocalPaths | None = None
    """Rows for validation: a file or a list (parquet, json, jsonl, csv); null takes the start assets'."""
    val_max_samples: CountOrOff = -1
    """Use at most this many validation rows; -1 takes all."""
    apply_chat_template_kwargs: OpenDict = open_dict()
    """Arguments for the chat template, e.g. {enable_thinking: false}."""
    custom_cls: CustomClassConfig = Field(default_factory=CustomClassConfig)
    bad_rows: BadRows = "refuse"
    """What a row that cannot be used does: stop with file and row number, or be skipped and counted."""


class TrainingRowsConfig(RowsConfig):
    """Keys of every job that trains."""

    train_files: LocalPaths | None = None
    """Training rows: a file or a list (parquet, json, jsonl, csv); null takes the start assets' arithmetic."""
    train_max_samples: CountOrOff = -1
    """Use at most this many training rows; -1 takes all."""
    shuffle: Flag = True
    """Draw training rows in a new order each epoch."""
    seed: Seed = 1
    """Seed of that order."""


class PromptsConfig(RowsConfig):
    """Prompts to generate from."""

    val_batch_size: Count | None = None
    """Validation prompts generated at a time; null takes all at once."""
    max_prompt_length: Count = 512
    """Tokens a prompt is padded to; longer ones are filtered or truncated."""
    max_response_length: Count = 512
    """Tokens a response may have."""
    prompt_key: Text = "prompt"
    """Column of the prompt: a list of {role, content}, or plain text."""
    reward_fn_key: Text = "data_source"
    """Column that chooses the reward function."""
    truncation: Truncation = "error"
    """What happens to a prompt that is too long and was not filtered."""
    filter_overlong_prompts: Flag = False
    """Drop prompts that are too long before anything starts."""
    filter_overlong_prompts_workers: Count = 1
    """Threads that read and measure prompts."""


class DataConfig(PromptsConfig, TrainingRowsConfig):
    """Prompts for PPO."""

    train_files: LocalPaths | None = ("~/data/rlhf/gsm8k/train.parquet",)
    """Training rows: a file or a list (parquet, json, jsonl, csv); null takes the start assets' arithmetic."""
    val_files: LocalPaths | None = ("~/data/rlhf/gsm8k/test.parquet",)
    """Rows for validation, as train_files; null with train_files null takes the held-out part of the start assets."""
    train_batch_size: Count = 1024
    """Prompts of a step; each is answered actor_rollout_ref.rollout.n times."""
    gen_batch_size: Count = linked(".train_batch_size")
    """Prompts sent to the rollout at a time; more than train_batch_size makes sense with algorithm.filter_groups."""
    validation_shuffle: Flag = False
    """Draw validation rows in a shuffled order (fixed by seed)."""


class SupervisedDataConfig(TrainingRowsConfig):
    """Texts for SFT and for reward models."""

    train_batch_size: Count = 256
    """Rows of one optimizer step."""
    micro_batch_size_per_gpu: Count = 4
    """Rows of one forward and backward pass on a rank."""
    use_dynamic_bsz: Flag = True
    """Fill micro-batches by tokens instead of by rows."""
    max_token_len_per_gpu: Count = 8192
    """Tokens of one micro-batch on a rank, with use_dynamic_bsz."""
    max_length: Count = 1024
    """Tokens of a whole text."""
    truncation: Truncation = "error"
    """What happens to a text that is too long."""


class SFTDataConfig(SupervisedDataConfig):
    """Conversations, or prompt and response columns."""

    messages_key: Text | None = "messages"
    """Column of the conversation; null reads prompt_key and response_key instead."""
    prompt_key: Text = "prompt"
    """Column of the prompt, where messages_key is null."""
    response_key: Text = "response"
    """Column of the response, where messages_key is null."""


class RMDataConfig(SupervisedDataConfig):
    """Pairs: a prompt, a chosen and a rejected response."""

    prompt_key: Text = "prompt"
    """Column of the prompt."""
    chosen_key: Text = "chosen"
    """Column of the better response."""
    rejected_key: Text = "rejected"
    """Column of the worse response."""
