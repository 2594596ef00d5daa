"""The job of head_to_head.py by TRL's public API, with the seconds of its phases under verl's names.

TRL's own profiling contexts report to trackers only, so their times are taken here. The device is synchronised around
the parts of a prepared batch and at the end of a step, and never within an update, which is the rest of the step.
"""

import argparse
import importlib.util
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import trl.extras.profiling as profiling  # pyrefly: ignore[missing-import]
from datasets import Dataset
from torch.profiler import profile, record_function
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyrefly: ignore[missing-import]

PARTS = {"vLLM.generate": "gen", "sync_weights": "update_weights", "_get_per_token_logps_and_entropies": "old_log_prob"}
spent: defaultdict[str, float] = defaultdict(float)
preparing = [False]


def enter(context: Any) -> Any:
    """Start the clock of one of TRL's profiling contexts; log-probs are old ones only while a batch is prepared."""
    part = context.name.removeprefix("GRPOTrainer.")
    if preparing[0]:
        torch.cuda.synchronize()
    preparing[0] = preparing[0] or part == "_prepare_inputs"
    context.part = PARTS.get(part, part)
    if context.part == "old_log_prob" and not preparing[0]:
        context.part = "update_actor"
    context.range = record_function({"_prepare_inputs": "rest"}.get(part, context.part))
    context.range.__enter__()
    context.started_s = time.perf_counter()
    return context


def leave(context: Any, *_: object) -> None:
    """Book its seconds."""
    if preparing[0] and context.part != "_prepare_inputs":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - context.started_s
    context.range.__exit__(None, None, None)
    if context.part == "_prepare_inputs":
        preparing[0], spent["prepare"] = False, spent["prepare"] + seconds
    elif context.part in PARTS.values():
        spent[context.part] += seconds


@contextmanager
def profiled_to(path: Path) -> Iterator[None]:
    """A profile as rlsys takes it."""
    path.parent.mkdir()
    with profile(record_shapes=True) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


class Steps(TrainerCallback):
    """Writes a line of metrics after each step, and a profile of one."""

    def __init__(self, folder: Path, profiled: int) -> None:
        self.file, self.last_s = (folder / "metrics.jsonl").open("w", buffering=1), time.perf_counter()
        self.path, self.profiled, self.profile = folder / "profile" / f"step{profiled}.json.gz", profiled, ExitStack()

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step + 1 == self.profiled:
            self.profile.enter_context(profiled_to(self.path))
            self.profile.enter_context(record_function("update_actor"))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.profile.close()
        step_s, self.last_s = time.perf_counter() - self.last_s, time.perf_counter()
        update_s = step_s - spent.pop("prepare", 0.0)
        tokens = {name: spent.pop(name) for name in ["response_length/mean"] if name in spent}
        line = tokens | {f"timing_s/{name}": seconds for name, seconds in {**spent, "update_actor": update_s}.items()}
        self.file.write(json.dumps(line) + "\n")
        spent.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("job", "model", "out"):
        parser.add_argument(name, type=Path)
    for name in ("steps", "new", "prompts"):
        parser.add_argument(name, type=int)
    parser.add_argument("--memory", type=float, default=0.5)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--ids", action="store_true", help="vLLM makes no text of its tokens")
    parser.add_argument("--natural", action="store_true")
    parser.add_argument("--profile", action="store_true", help="of the last step")
    args = parser.parse_args()
    profiling.ProfilingContext.__enter__, profiling.ProfilingContext.__exit__ = enter, leave
    spec: Any = importlib.util.spec_from_file_location("reward", args.job / "reward.py")
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)
    rows = pq.read_table(args.job / "train.parquet").to_pylist()
    config = GRPOConfig(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=args.prompts * 8 // 32,
        num_generations=8,
        max_completion_length=args.new,
        beta=0.0,
        learning_rate=1e-6,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        warmup_steps=0,
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        shuffle_dataset=False,
        disable_tqdm=True,
        generation_kwargs={"ignore_eos": not args.natural, "detokenize": not args.ids},
        model_init_kwargs={"attn_implementation": "flash_attention_2", "dtype": "float32"},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.memory,
        vllm_enable_sleep_mode=args.sleep,
        vllm_max_model_length=192 + args.new,
    )

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        spent["response_length/mean"] = sum(map(len, completion_ids)) / len(completion_ids)
        return [reward.compute_score("h2h", text, "0") for text in completions]

    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    GRPOTrainer(
        model=str(args.model),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[Steps(args.out, args.steps if args.profile else 0)],
    ).train()


if __name__ == "__main__":
    main()
