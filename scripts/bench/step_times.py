"""The step-time planner against runs that were measured: seconds by phase, planned / measured, and their ratio.

    python scripts/bench/step_times.py

The runs are those of docs/performance.md. The factors of rlsys/planning/step_time.py were fitted to them: the table
shows how well one set of factors describes all of them, not how well it predicts what was never measured. What
switching memory took stands apart and is left out of the steps where it is known (of one run of the 1.5B it is
not), and of the first one the 0.7 s in which rollouts were written; pushes of code that made a checksum a launch are
left out too.

The second table is no fit: steps on many H100s that NeMo-RL published (v0.4, docs/about/performance-summary.md), other
code with the same engines (Megatron-Core and vLLM), beside the plan for the same sizes and tokens.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from rlsys.config import load_config  # noqa: E402
from rlsys.planning.memory import Lengths, Machine  # noqa: E402
from rlsys.planning.step_time import GpuCluster, plan_step, step_seconds  # noqa: E402
from rlsys.utils.gpus import GPUS  # noqa: E402
from rlsys.utils.tables import aligned  # noqa: E402
from scripts.model_shapes import SHAPES  # noqa: E402

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
FILES = ("data.train_files=null", "data.val_files=null", f"{MODEL}.path=null", "algorithm.adv_estimator=remax")
PHASES = ("rollout", "old_log_prob", "update_actor", "update_weights", "step", "switch")
WITHIN = 0.15


@dataclass(frozen=True)
class Measured:
    """A run: its shape and GPU, tokens of prompts and responses on average and at most, and seconds of PHASES.

    0 seconds were not measured. `sigma` is that of lengths that the model chose itself.
    """

    name: str
    model: str
    tokens: tuple[int, int, int]
    settings: tuple[str, ...]
    seconds: tuple[float, ...]
    sigma: float = 0.0


def job(prompts: int, answers: int, *more: str, tokens: int = 16384, kept: bool = False) -> tuple[str, ...]:
    """Settings of a job, in most runs with one step a schedule; with `kept` activations are not computed again."""
    rows = (f"data.train_batch_size={prompts}", f"{ACTOR}.ppo_mini_batch_size={prompts}", f"{ROLLOUT}.n={answers}")
    micro = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}")
    recompute = f"{MODEL}.enable_gradient_checkpointing={str(not kept).lower()}"
    settings = (*rows, *micro, recompute, f"{ROLLOUT}.max_num_seqs=512", *more)
    names = " ".join(settings)
    return (*settings, ONE_STEP) if "vllm" in names and "num_scheduler_steps" not in names else settings


def layout(text: str) -> str:
    return f"trainer.allocation_mode={text}"


VLLM, SGLANG, HF = (f"{ROLLOUT}.name={name}" for name in ("vllm", "sglang", "hf"))
ONE_STEP = f"{ROLLOUT}.num_scheduler_steps=1"
COMPILED = f"{ACTOR}.fsdp_config.use_torch_compile=true"
MEGATRON, TWO = f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=2"
FULL, FORCED, SHORT = (55, 512, 512), (128, 256, 256), (40, 27, 64)
LONG = {"tokens": 4096, "kept": True}
CHOSEN_JOB = job(64, 8, VLLM, COMPILED, f"{ROLLOUT}.num_scheduler_steps=8", tokens=65536, kept=True)
COMPILED_JOB = job(64, 8, VLLM, COMPILED, kept=True)
RUNS = (
    Measured(
        "TP2 PP2, vLLM", "7B H200", FULL, job(64, 4, layout("vllm:d2t2|megatron:t2p2")), (3.03, 1.27, 4.38, 0, 8.9)
    ),
    Measured(
        "TP2 PP2, SGLang",
        "7B H200",
        FULL,
        job(64, 4, layout("sglang:d2t2|megatron:t2p2")),
        (3.27, 1.28, 4.32, 0.073, 9.2),
    ),
    Measured("TP2, vLLM", "7B H200", FULL, job(32, 4, layout("vllm:t2|megatron:t2")), (3.20, 1.09, 3.89, 0.077, 8.3)),
    Measured(
        "TP2, SGLang", "7B H200", FULL, job(32, 4, layout("sglang:t2|megatron:t2")), (2.90, 1.09, 3.87, 0.083, 8.0)
    ),
    Measured("FSDP2, vLLM", "7B H200", FULL, job(32, 4, layout("vllm:t2|fsdp:d2")), (2.76, 1.22, 4.21, 0.099, 8.34)),
    Measured(
        "FSDP2, SGLang", "7B H200", FULL, job(32, 4, layout("sglang:t2|fsdp:d2")), (2.64, 1.23, 4.20, 0.111, 8.25)
    ),
    Measured(
        "one GPU, compiled FSDP, vLLM",
        "7B H200",
        FORCED,
        job(64, 8, VLLM, COMPILED, f"{ROLLOUT}.gpu_memory_utilization=0.25", tokens=11520),
        (4.73, 4.75, 20.56, 0.078, 30.29, 0.28),
    ),
    Measured(
        "the same, SGLang",
        "7B H200",
        FORCED,
        job(64, 8, SGLANG, COMPILED, f"{ROLLOUT}.gpu_memory_utilization=0.3", tokens=11520),
        (4.99, 4.80, 20.51, 0.085, 30.58, 0.20),
    ),
    Measured("compiled FSDP, vLLM", "1.5B H200", FORCED, COMPILED_JOB, (4.54, 1.35, 4.02, 0.038, 10.23, 0.18)),
    Measured("the same, another host", "1.5B H200", FORCED, COMPILED_JOB, (3.36, 1.37, 4.01, 0.109, 9.16)),
    Measured(
        "sizes chosen, vLLM, 8 steps",
        "1.5B H200",
        FORCED,
        job(64, 8, VLLM, COMPILED, f"{ROLLOUT}.num_scheduler_steps=8", tokens=36864, kept=True),
        (1.74, 1.29, 3.76, 0.018, 6.99, 0.26),
    ),
    Measured(
        "sizes chosen, SGLang",
        "1.5B H200",
        FORCED,
        job(64, 8, SGLANG, COMPILED, tokens=36864, kept=True),
        (1.97, 1.29, 3.76, 0.022, 7.22, 0.20),
    ),
    Measured("compiled FSDP, vLLM", "0.5B H200", FORCED, COMPILED_JOB, (2.99, 0.59, 1.58, 0.04, 5.28)),
    Measured("the same, another host", "0.5B H200", FORCED, COMPILED_JOB, (3.48, 0.66, 1.85, 0.056, 6.20)),
    Measured("the same, sizes chosen, 8 steps", "0.5B H200", FORCED, CHOSEN_JOB, (1.89, 0.56, 1.49, 0.017, 4.11, 0.25)),
    Measured("the same, another host", "0.5B H200", FORCED, CHOSEN_JOB, (2.29, 0.59, 1.57, 0.02, 4.74, 0.27)),
    Measured("the same, a third host", "0.5B H200", FORCED, CHOSEN_JOB, (1.47, 0.55, 1.50, 0.007, 3.64, 0.19)),
    Measured("the same, a fourth host", "0.5B H200", FORCED, CHOSEN_JOB, (1.24, 0.55, 1.48, 0.01, 3.41, 0.17)),
    Measured(
        "sizes chosen, SGLang",
        "0.5B H200",
        FORCED,
        job(64, 8, SGLANG, COMPILED, tokens=65536, kept=True),
        (1.76, 0.58, 1.61, 0.037, 4.19, 0.12),
    ),
    Measured("FSDP", "0.5B H100", FORCED, job(64, 8, VLLM, kept=True), (0, 1.01, 3.12, 0, 0)),
    Measured("compiled FSDP", "0.5B H100", FORCED, COMPILED_JOB, (0, 0.79, 2.29, 0, 0)),
    Measured("vLLM alone, 256 x 128", "7B H200", (100, 128, 128), job(32, 8, VLLM), (1.24, 0, 0, 0, 0)),
    Measured("vLLM alone", "135M H200", (100, 256, 256), job(64, 8, VLLM), (2.53, 0, 0, 0, 0)),
    Measured("SGLang alone", "135M H200", (100, 256, 256), job(64, 8, SGLANG), (1.34, 0, 0, 0, 0)),
    Measured(
        "FSDP, SGLang", "135M H200", (50, 256, 256), job(64, 8, SGLANG, tokens=12288), (1.40, 0, 3.40, 0.038, 5.89)
    ),
    Measured(
        "FSDP, vLLM, natural",
        "135M H200",
        (50, 47, 256),
        job(64, 8, VLLM, tokens=12288),
        (1.23, 0.31, 1.30, 0.063, 3.26),
        sigma=1.0,
    ),
    Measured("FSDP, vLLM, short", "135M H200", SHORT, job(32, 8, VLLM), (0.27, 0, 0.38, 0, 0.97), sigma=0.6),
    Measured(
        "Megatron, vLLM, short", "135M H200", SHORT, job(32, 8, VLLM, MEGATRON), (0.34, 0, 0.33, 0, 1.03), sigma=0.6
    ),
    Measured("FSDP, HF, short", "135M H200", SHORT, job(32, 8, HF), (2.91, 0.116, 0.42, 0, 3.90), sigma=0.6),
    Measured(
        "FSDP, HF, short, 2 GPUs", "135M H200", SHORT, job(32, 8, HF, TWO), (2.91, 0.075, 0.296, 0, 3.81), sigma=0.6
    ),
    Measured("FSDP, SGLang, short", "135M H200", SHORT, job(32, 8, SGLANG), (0.38, 0.11, 0.40, 0, 0), sigma=0.6),
    Measured(
        "Megatron DP2, 8 x 4096", "7B H200", (1, 4095, 4095), job(8, 1, TWO, MEGATRON, **LONG), (0, 0, 2.09, 0, 0)
    ),
    Measured(
        "Megatron TP2, 8 x 4096",
        "7B H200",
        (1, 4095, 4095),
        job(8, 1, TWO, MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=2", tokens=8192, kept=True),
        (0, 0, 2.02, 0, 0),
    ),
    Measured("FSDP2, 8 x 4096", "7B H200", (1, 4095, 4095), job(8, 1, TWO, **LONG), (0, 0, 2.22, 0, 0)),
    Measured(
        "compiled FSDP2, 8 x 4096", "7B H200", (1, 4095, 4095), job(8, 1, TWO, COMPILED, **LONG), (0, 0, 2.04, 0, 0)
    ),
    Measured("Megatron, 8 x 4096", "0.5B H200", (1, 4095, 4095), job(8, 1, MEGATRON, **LONG), (0, 0, 0.67, 0, 0)),
    Measured("FSDP, 8 x 4096", "0.5B H200", (1, 4095, 4095), job(8, 1, **LONG), (0, 0, 0.80, 0, 0)),
)


@dataclass(frozen=True)
class Published:
    """Seconds of a step, mean and largest tokens of a row, rows, (TP, CP, EP, PP) of training, TP of the rollout."""

    model: str
    gpus: int
    seconds: float
    tokens: tuple[int, int]
    rows: int
    training: tuple[int, int, int, int]
    rollout: int
    last_layers: int | None = None
    recompute: bool = True

    @property
    def settings(self) -> tuple[str, ...]:
        names = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
        names += ("pipeline_model_parallel_size", "expert_tensor_parallel_size")
        sizes = [f"{ACTOR}.megatron.{name}={size}" for name, size in zip(names, (*self.training, 1), strict=True)]
        last = f"{ACTOR}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage={self.last_layers}"
        return (
            *(VLLM, ONE_STEP, MEGATRON, *sizes, *([last] if self.last_layers else [])),
            f"{MODEL}.enable_gradient_checkpointing={str(self.recompute).lower()}",
            *(f"{ROLLOUT}.tensor_model_parallel_size={self.rollout}", f"{ROLLOUT}.max_num_seqs=1024"),
            *(f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.n=16", f"data.train_batch_size={self.rows // 16}"),
            *("data.max_prompt_length=512", f"data.max_response_length={self.tokens[1] - 512}"),
            *(f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.use_dynamic_bsz=true"),
            *(f"{ACTOR}.ppo_max_token_len_per_gpu={self.tokens[1]}", f"trainer.nnodes={self.gpus // 8}"),
            "trainer.n_gpus_per_node=8",
        )


PUBLISHED = (
    Published("8B", 16, 97.7, (1060, 4096), 2048, (1, 1, 1, 2), 1),
    Published("32B", 32, 393.0, (3206, 4096), 2048, (4, 1, 1, 4), 4, recompute=False),
    Published("30B-A3B", 32, 225.0, (3154, 4096), 2048, (2, 1, 8, 1), 4, recompute=False),
    Published("235B-A22B", 128, 506.0, (5671, 8192), 512, (2, 2, 16, 8), 16, 10),
    Published("671B", 256, 154.0, (745, 1536), 512, (1, 1, 16, 16), 32, 1),
)


def planned_as_published(run: Published) -> float:
    """Seconds of a step by the planner."""
    mean, longest = run.tokens
    cfg = load_config(["--config-name", "quickstart", *FILES, *run.settings])
    lengths = Lengths(512, longest - 512, 120, mean - 120)
    machine, cluster = Machine("cuda", 0, SHAPES[run.model]), GpuCluster(GPUS["H100"], 8)
    return step_seconds(cfg, plan_step(cfg, machine, cluster, lengths=lengths, sigma=0.8))


def planned(run: Measured) -> dict[str, float]:
    """Seconds of PHASES by the planner."""
    prompt, response, longest = run.tokens
    lengths, (shape, gpu) = Lengths(prompt, longest, prompt, response), run.model.split()
    cfg = load_config(["--config-name", "quickstart", *FILES, *run.settings])
    machine, cluster = Machine("cuda", 0, SHAPES[shape]), GpuCluster(GPUS[gpu], 8)
    phases = plan_step(cfg, machine, cluster, lengths=lengths, sigma=run.sigma)
    in_step = [phase for phase in phases if phase.name != "switch"]
    return {phase.name: phase.total for phase in phases} | {"step": step_seconds(cfg, in_step)}


def main() -> None:
    """Print a row for each run and phase."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lines, ratios = [["run", *PHASES]], list[float]()
    for run in RUNS:
        cells, seconds = [f"{run.model}, {run.name}"], planned(run)
        for number, name in enumerate(PHASES):
            measured, by_plan = run.seconds[number] if number < len(run.seconds) else 0.0, seconds.get(name, 0.0)
            ratio = by_plan / (measured or 1.0)
            cells.append(f"{by_plan:.2f} / {measured:.2f} {ratio:.2f}" if measured else "")
            ratios += [ratio] * bool(measured)
        lines.append(cells)
    print(aligned(lines))
    near = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    print(f"{near} of {len(ratios)} within {WITHIN:.0%}; the others {min(ratios):.2f} to {max(ratios):.2f}\n")
    lines = [["NeMo-RL v0.4, H100", "GPUs", "planned s", "published s", "ratio"]]
    for other in PUBLISHED:
        step = planned_as_published(other)
        lines.append(
            [other.model, str(other.gpus), f"{step:.1f}", f"{other.seconds:.1f}", f"{step / other.seconds:.2f}"]
        )
    print(aligned(lines))


if __name__ == "__main__":
    main()
