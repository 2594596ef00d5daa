"""Prompts: from files to rows, and from rows to batches in an order that can be resumed at any batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.config import GradedJob, PPOConfig
from rlsys.config.plan import check_enough_rows, total_steps
from rlsys.config.schema.data import DataConfig
from rlsys.data.collate import collate_prompts
from rlsys.data.cursor import Cursor
from rlsys.data.dataset import PromptDataset, RowStream, configured_source, parse_prompt
from rlsys.data.rl_sampler import SamplerCursor
from rlsys.data.rows import default_source
from rlsys.data.videos import is_video
from rlsys.data.vision_processor import VisionProcessor
from rlsys.interfaces import State
from rlsys.protocol import DataProto
from rlsys.utils.errors import DataError


@dataclass(frozen=True)
class CollatedPrompts:
    """Padded batches of a dataset in the order of a cursor."""

    cursor: Cursor | RowStream
    dataset: PromptDataset
    max_prompt_tokens: int
    pad_token_id: int

    def next(self) -> DataProto:
        step, length, pad = self.cursor.next(), self.max_prompt_tokens, self.pad_token_id
        rows = [self.dataset[index] for index in step.rows]
        return collate_prompts(rows, prompt_length=length, pad_token_id=pad, epoch=step.epoch)

    def state_dict(self) -> dict[str, object]:
        return self.cursor.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.cursor.load_state_dict(state)


def training_prompts(
    data: DataConfig, dataset: PromptDataset, sampler: Sampler[int] | None = None, *, pad_token_id: int, restarts: bool
) -> CollatedPrompts:
    """Training batches in the order that the data section asks for, or that of a sampler; `restarts` as in a cursor."""
    if isinstance(dataset, RowStream):
        dataset.restart()  # where the trainer has run before
        return CollatedPrompts(dataset, dataset, data.max_prompt_length, pad_token_id)
    make_cursor = Cursor if sampler is None else partial(SamplerCursor, sampler)
    options = {"batch_size": data.gen_batch_size, "seed": data.seed, "shuffle": data.shuffle}
    cursor = make_cursor(len(dataset), **options, dataset=dataset.fingerprint, restarts=restarts)
    return CollatedPrompts(cursor, dataset, data.max_prompt_length, pad_token_id)


def num_steps(cfg: PPOConfig, dataset: PromptDataset) -> int:
    """Steps of the whole run; ConfigError if there are fewer rows than in a batch."""
    size = cfg.data.gen_batch_size
    if not cfg.data.streaming:
        check_enough_rows(len(dataset), size)
    return total_steps(len(dataset), size, cfg.trainer.total_epochs, cfg.trainer.total_training_steps)


def prompt_datasets(
    config: PPOConfig, tokenizer: Tokenizer, processor: VisionProcessor | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Training and validation prompts."""
    data, load = config.data, partial(load_prompts, config, tokenizer, processor=processor)
    assert data.train_files is not None
    if data.streaming:
        source = default_source(config)
        parse = partial(parse_prompt, tokenizer=tokenizer, config=data, source=source, processor=processor)
        train = RowStream(data.train_files, data, parse, data.gen_batch_size)
        _check_agents(config, train)
    else:
        train = load(data.train_files, max_samples=data.train_max_samples, seed=data.seed if data.shuffle else None)
    seed = data.seed if data.validation_shuffle else None
    return train, load(data.val_files, max_samples=data.val_max_samples, seed=seed) if data.val_files else None


def load_prompts(
    config: GradedJob,
    tokenizer: Tokenizer,
    files: Sequence[str],
    *,
    max_samples: int,
    seed: int | None = None,
    processor: VisionProcessor | None = None,
) -> PromptDataset:
    """The rows of `files`, or of the dataset class of data.custom_cls; `seed` draws those of a sample.

    DataError for rows that ask for tools where there is no workflow.
    """
    data = config.data
    source = configured_source(data, files, tokenizer=tokenizer, max_samples=max_samples)
    name = default_source(config)
    load = partial(PromptDataset.load, source, tokenizer, data, default_source=name, processor=processor)
    rows = load() if data.custom_cls.path is not None else load(max_samples=max_samples, seed=seed)
    _check_agents(config, rows)
    return rows


def _check_agents(config: GradedJob, rows: PromptDataset) -> None:
    """DataError for a row that asks for an agent or a tool without a workflow, or has a video with one."""
    has_workflow = config.actor_rollout_ref.rollout.has_workflow
    for row in rows:
        if has_workflow and any(map(is_video, row.images)):
            raise DataError(f"row {row.index}: workflows take no videos; write their frames as images")
        names = ("need_tools_kwargs", "tools_kwargs", "interaction_kwargs")
        asks = [f"extra_info.{name}" for name in names if row.extra_info.get(name)]
        if row.fields.get("agent_name") not in (None, "", "single_turn_agent"):
            asks.insert(0, "agent_name")
        if asks and not has_workflow:
            why = f"row {row.index}: {asks[0]} asks for tools, but the rollout is single-turn"
            raise DataError(f"{why}; set actor_rollout_ref.rollout.multi_turn.enable=true or remove it")


def load_processor(config: GradedJob, tokenizer: Tokenizer) -> VisionProcessor | None:
    """The image processor of the policy, None for a model of text; ConfigError for one that cannot be used."""
    path = config.actor_rollout_ref.model.path
    limit = config.actor_rollout_ref.rollout.limit_images
    assert path is not None
    return VisionProcessor.from_path(path, tokenizer, settings=config.data.mm_processor_kwargs, limit_images=limit)
