"""All checks of settings against each other and against the machine; each value was checked by its type before."""

from collections.abc import Iterator

from rlsys.config.checks.algorithm import check_algorithm
from rlsys.config.checks.batches import check_ppo_batches, check_supervised_batches
from rlsys.config.checks.files import check_files
from rlsys.config.checks.findings import Note
from rlsys.config.checks.megatron import check_megatron
from rlsys.config.checks.rollout import check_rollout, check_sampling
from rlsys.config.checks.rules import check_rules
from rlsys.config.checks.run import check_checkpoint, check_optimizer, check_ppo_run, check_run
from rlsys.config.checks.vision import check_vision
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import EvalConfig, PPOConfig, SupervisedConfig


def check(cfg: Section) -> tuple[list[str], list[str]]:
    """The problems and the notes of a configuration."""
    findings = list(_findings(cfg))
    problems = [text for text in findings if not isinstance(text, Note)]
    return problems, [str(text) for text in findings if isinstance(text, Note)]


def _findings(cfg: Section) -> Iterator[str]:
    yield from check_rules(cfg)
    if not isinstance(cfg, PPOConfig | SupervisedConfig | EvalConfig):
        return
    yield from check_run(cfg)
    if isinstance(cfg, PPOConfig | SupervisedConfig):
        yield from check_megatron(cfg)
    if isinstance(cfg, PPOConfig):
        yield from check_ppo_batches(cfg)
        yield from check_algorithm(cfg)
        yield from check_sampling(cfg)
        yield from check_ppo_run(cfg)
    elif isinstance(cfg, EvalConfig):
        yield from check_rollout(cfg, cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node)
    else:
        yield from check_supervised_batches(cfg)
        yield from check_checkpoint(cfg, "checkpoint", cfg.checkpoint)
        yield from check_optimizer(cfg, "optim", cfg.optim, cfg.engine.strategy)
    yield from check_files(cfg)
    if isinstance(cfg, PPOConfig | EvalConfig):
        yield from check_vision(cfg)
