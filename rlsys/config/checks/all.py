"""All checks of settings against each other and against the machine; each value was checked by its type before."""

from rlsys.config.checks.algorithm import check_algorithm
from rlsys.config.checks.batches import check_ppo_batches, check_supervised_batches
from rlsys.config.checks.files import check_files
from rlsys.config.checks.findings import Note
from rlsys.config.checks.megatron import check_megatron
from rlsys.config.checks.rollout import check_rollout
from rlsys.config.checks.rules import check_rules
from rlsys.config.checks.run import check_ppo_run, check_run, check_training
from rlsys.config.checks.vision import check_vision
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import EvalConfig, GradedJob, PPOConfig, SupervisedConfig


def check(cfg: Section, *, is_here: bool = False) -> tuple[list[str], list[str]]:
    """The problems and the notes of a configuration; of a run that `is_here` also the packages that are not."""
    findings = [*check_rules(cfg, is_here=is_here)]
    if isinstance(cfg, PPOConfig | SupervisedConfig | EvalConfig):
        findings += check_files(cfg)
    if isinstance(cfg, PPOConfig | SupervisedConfig):
        findings += [*check_run(cfg, is_here=is_here), *check_megatron(cfg)]
    if isinstance(cfg, GradedJob):
        findings += check_vision(cfg)
    if isinstance(cfg, PPOConfig):
        findings += [*check_ppo_batches(cfg), *check_algorithm(cfg), *check_ppo_run(cfg)]
    elif isinstance(cfg, EvalConfig):
        findings += check_rollout(cfg, cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node)
    elif isinstance(cfg, SupervisedConfig):
        findings += [*check_supervised_batches(cfg), *check_training(cfg, "", cfg)]
    problems = [text for text in findings if not isinstance(text, Note)]
    return problems, [text for text in findings if isinstance(text, Note)]
