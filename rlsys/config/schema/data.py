"""Data files, and how rows become prompts or training texts."""

from typing import Literal

from rlsys.config.schema import types as t
from rlsys.config.schema.base import Section, linked, open_dict, section

Truncation = Literal["error", "left", "right", "middle"]
BadRows = Literal["refuse", "skip"]


class CustomClassConfig(Section):
    """A custom dataset class."""

    path: t.LocalPath | None = None
    """Python file of the class."""
    name: t.Text | None = None
    """Name of the class: __init__(data_files, tokenizer, config, processor, max_samples)."""


class SamplerConfig(Section):
    """A custom order of the training rows."""

    class_path: t.LocalPath | None = None
    """Python file of the class, or pkg:// and its module."""
    class_name: t.Text | None = None
    """Name of the class: a Sampler, __init__(data_source, data_config), whose `update` gets each trained batch."""


class RowsConfig(Section):
    """Validation rows and how rows are read, for every job."""

    val_files: t.LocalPaths | None = None
    """Rows for validation: a file or a list (parquet, json, jsonl, csv); null is none; an evaluation needs them."""
    val_max_samples: t.CountOrAll = -1
    """Use at most this many validation rows; -1 uses all."""
    apply_chat_template_kwargs: t.OpenDict = open_dict()
    """Arguments of the chat template, e.g. {enable_thinking: false}."""
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    bad_rows: BadRows = "refuse"
    """Stop at a row that cannot be used, with its file and number (refuse), or skip and count it."""


class TrainingRowsConfig(RowsConfig):
    """Training rows, for every job that trains."""

    train_files: t.LocalPaths | None = None
    """Training rows: files (parquet, json, jsonl, csv) or org/name[:config]:split of the hub; null: start assets."""
    train_max_samples: t.CountOrAll = -1
    """Use at most this many training rows; -1 uses all."""
    shuffle: t.Flag = True
    """Shuffle training rows every epoch."""
    seed: t.Seed = 1
    """Seed of that shuffling."""
    streaming: t.Flag = False
    """Read training rows during training, and of datasets of the hub for validation the first
    val_max_samples."""
    shuffle_buffer_size: t.Count = 10000
    """Rows that are read, and with shuffle permuted, at a time."""


class PromptsConfig(RowsConfig):
    """Prompts to generate from."""

    val_batch_size: t.Count | None = None
    """Validation prompts generated at a time; null is all at once."""
    max_prompt_length: t.Count = 512
    """Tokens that prompts are padded to; longer ones are filtered or truncated."""
    max_response_length: t.Count = 512
    """Longest response, in tokens."""
    prompt_key: t.Text = "prompt"
    """Column of the prompt: a list of {role, content}, or text."""
    image_key: t.Text = "images"
    """Column of a prompt's images, for vision-language models: each <image> of the prompt stands for the next one."""
    video_key: t.Text = "videos"
    """Column of a prompt's videos: each <video> of the prompt stands for the next one."""
    mm_processor_kwargs: t.OpenDict = open_dict()
    """Settings of the model's image processor, e.g. {max_pixels: 401408}."""
    answer_key: t.Text | None = None
    """Column of the ground truth; null takes reward_model.ground_truth, or the column ground_truth."""
    reward_fn_key: t.Text = "data_source"
    """Column that chooses the reward function; rows need none with a custom_reward_function."""
    truncation: Truncation = "error"
    """How a prompt that is too long and not filtered is truncated; error stops."""
    filter_overlong_prompts: t.Flag = False
    """Drop prompts that are too long before training starts."""
    filter_overlong_prompts_workers: t.Count = 1
    """Threads that tokenize prompts before training starts."""


class DataConfig(PromptsConfig, TrainingRowsConfig):
    """Prompts for PPO."""

    train_files: t.LocalPaths | None = ("~/data/rlhf/gsm8k/train.parquet",)
    """Training rows: a file or a list (parquet, json, jsonl, csv); null takes the arithmetic of the start assets."""
    val_files: t.LocalPaths | None = None
    """Rows for validation, as train_files; null is none, or the held-out part of the start assets with theirs."""
    train_batch_size: t.Count = 1024
    """Prompts per step; each gets actor_rollout_ref.rollout.n answers."""
    gen_batch_size: t.Count = linked(".train_batch_size")
    """Prompts generated at a time; more than train_batch_size needs algorithm.filter_groups."""
    sampler: SamplerConfig = section(SamplerConfig)
    validation_shuffle: t.Flag = False
    """Draw the val_max_samples validation rows by seed, instead of the first ones."""


class SupervisedDataConfig(TrainingRowsConfig):
    """Texts for SFT and reward models."""

    train_batch_size: t.Count = 256
    """Rows per optimizer step."""
    micro_batch_size_per_gpu: t.Count = 4
    """Rows per forward and backward pass on a rank."""
    use_dynamic_bsz: t.Flag = True
    """Fill micro-batches up to a number of tokens instead of rows."""
    max_token_len_per_gpu: t.Count = 8192
    """Tokens per micro-batch on a rank, with use_dynamic_bsz."""
    max_length: t.Count = 1024
    """Longest text, in tokens."""
    truncation: Truncation = "error"
    """How a text that is too long is truncated; error stops."""
    prompt_key: t.Text = "prompt"
    """Column of the prompt; for SFT of rows without a conversation."""

    @property
    def training(self) -> t.MicroBatches:
        """The micro-batches of a step."""
        return t.micro_batches(self.use_dynamic_bsz, self.micro_batch_size_per_gpu, self.max_token_len_per_gpu)


class SFTDataConfig(SupervisedDataConfig):
    """Conversations, or prompt and response columns."""

    messages_key: t.Text | None = "messages"
    """Column of the conversation; null, or a file without it, uses prompt_key and response_key."""
    response_key: t.Text = "response"
    """Column of the response, where there is no conversation."""
    prompt_dict_keys: t.Texts | None = None
    """Name of the prompt in a column of objects."""
    response_dict_keys: t.Texts | None = None
    """Name of the response in a column of objects."""


class RMDataConfig(SupervisedDataConfig):
    """Pairs: a prompt, a chosen and a rejected response."""

    chosen_key: t.Text = "chosen"
    """Column of the better response."""
    rejected_key: t.Text = "rejected"
    """Column of the worse response."""


class DPODataConfig(RMDataConfig):
    """Pairs, or for KTO a prompt, a completion and whether it is desirable."""

    completion_key: t.Text = "completion"
    """kto: column of the response."""
    label_key: t.Text = "label"
    """kto: column that is true for a desirable response."""
