"""Megatron's parallel sizes and a rank's place among them; nothing here imports Megatron."""

from dataclasses import dataclass, replace
from typing import Self

from rlsys.config.schema.megatron import MegatronShardConfig
from rlsys.models.megatron.blocks import Settings

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def with_recompute(overrides: Settings, *, layers: bool) -> Settings:
    """The overrides with what is recomputed; `layers`: each layer is, where they have no recompute_granularity.

    Whole layers are recomputed one by one where neither recompute_method nor recompute_num_layers says how.
    """
    full = overrides.get("recompute_granularity", "full" if layers else None) == "full"
    return overrides | {name: how for name, how in RECOMPUTE.items() if full and overrides.get(name) is None}


@dataclass(frozen=True)
class ParallelSizes:
    """Tensor, pipeline, virtual pipeline, context, expert and expert-tensor parallel sizes.

    Without `etp` experts are split like everything else (`tp`). `sequence_parallel` also splits norms and residuals
    over the tensor-parallel ranks; it has no effect where tp is 1. `first_layers` and `last_layers` are Megatron's
    num_layers_in_first/last_pipeline_stage for uneven splits.
    """

    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    first_layers: int | None = None
    last_layers: int | None = None

    @classmethod
    def from_config(cls, megatron: MegatronShardConfig) -> Self:
        """The sizes of a role's `megatron` section."""
        overrides = megatron.override_transformer_config
        return cls(
            tp=megatron.tensor_model_parallel_size,
            pp=megatron.pipeline_model_parallel_size,
            vp=megatron.virtual_pipeline_model_parallel_size or 1,
            cp=megatron.context_parallel_size,
            ep=megatron.expert_model_parallel_size,
            etp=megatron.expert_tensor_parallel_size,
            sequence_parallel=megatron.sequence_parallel,
            first_layers=overrides.get("num_layers_in_first_pipeline_stage"),
            last_layers=overrides.get("num_layers_in_last_pipeline_stage"),
        )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def arguments(self) -> Settings:
        """The sizes by Megatron's names."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp if self.vp > 1 else None,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tp,
        }


@dataclass(frozen=True)
class RankPlace:
    """A rank's place among the parallel ranks, as far as it decides which weights the rank holds."""

    sizes: ParallelSizes = ParallelSizes()
    tp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.sizes.pp - 1

    def without_tensor_parallelism(self) -> "RankPlace":
        """The same stage and experts with every weight whole."""
        return replace(self, sizes=replace(self.sizes, tp=1, etp=1), tp_rank=0, etp_rank=0)
