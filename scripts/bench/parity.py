"""Trainer against rollout on the same tokens: how far their log-probabilities are apart, as it is and in aligned mode.

    python scripts/bench/parity.py --out runs/parity
    python scripts/bench/parity.py --out runs/parity --model --shape 0.5B --modes default head aligned
    python scripts/bench/parity.py --out runs/parity --engines vllm --strategy megatron

Each engine samples `--rows` answers of `--tokens` tokens, the trainer (FSDP or Megatron) scores them in the same type.
Modes: `default`; `head`, where only the engine's logits are in float32; `aligned`, `rollout.full_determinism=true`.
Every model, engine and mode has a process of its own. They start together and are timed one after the other.

mean, max, K3, >0.01: of the log-probabilities noted while sampling against the trainer's (K3: KL in nats a token).
scored: the mean where the engine scores the tokens in one pass. repeat, batch, trainer: the share of tokens whose
log-probabilities are bitwise the same when the batch is sampled again, when its rows are sampled in other batches, and
when the trainer scores it in other micro-batches. Writes parity.json and parity.txt.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
POLICY = "actor_rollout_ref"
ROLLOUT = f"{POLICY}.rollout"
ENGINES = ("hf", "vllm", "sglang")
MODES = ("default", "head", "aligned")
SPARE = 8
"""Tokens beyond the answer, since vLLM draws one when it scores."""
MARK = "@parity "
THINGS = ("a river", "bread", "the moon", "a lost key", "an old clock", "bees", "a bridge", "winter")
TASKS = (
    "Write a story about",
    "Explain to a child",
    "Write a poem about",
    "List ten facts about",
    "Describe the sound of",
    "Write a letter to a friend about",
    "What would Aristotle say about",
    "Give a recipe that has to do with",
)
COLUMNS = {
    "model": "model",
    "engine": "engine",
    "mode": "mode",
    "mean": "mean",
    "max": "max",
    "k3": "K3",
    "over": ">0.01",
    "scored": "scored",
    "repeat": "repeat",
    "batch": "batch",
    "trainer": "trainer",
    "rate": "tokens/s",
    "trainer_rate": "trainer t/s",
    "start_s": "start s",
}


def overrides(work: dict[str, Any]) -> list[str]:
    """The configuration of one engine in one mode."""
    engine, mode, length = work["engine"], work["mode"], work["prompt"] + work["tokens"]
    cuda = work["device"] == "cuda"
    settings = [
        *(f"{POLICY}.model.path={work['path']}", f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.dtype={work['dtype']}"),
        *(f"{POLICY}.actor.strategy={work['strategy']}", f"{POLICY}.actor.fsdp_config.dtype={work['dtype']}"),
        *(f"{POLICY}.actor.megatron.dtype={work['dtype']}", f"{POLICY}.actor.use_dynamic_bsz=true"),
        *(f"{POLICY}.actor.ppo_max_token_len_per_gpu={8 * length}", f"{ROLLOUT}.max_num_seqs={work['rows']}"),
        *(f"{ROLLOUT}.max_model_len={length + SPARE}", f"{ROLLOUT}.full_determinism={str(mode == 'aligned').lower()}"),
        *(
            "data.train_files=null",
            "data.val_files=null",
            f"data.max_prompt_length={work['prompt']}",
            f"data.max_response_length={work['tokens']}",
        ),
        *(f"{ROLLOUT}.enforce_eager={str(not cuda).lower()}", f"{ROLLOUT}.kv_cache_gib=1"),
    ]
    room = 2 * work["rows"] * (length + 64)
    if engine == "vllm" and cuda:
        settings += [
            f"{ROLLOUT}.gpu_memory_utilization=0.05",
            f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=3221225472",
        ]
    if engine == "sglang" and cuda:
        settings += [
            f"{ROLLOUT}.gpu_memory_utilization=0.9",
            f"+{ROLLOUT}.engine_kwargs.sglang.max_total_tokens={room}",
        ]
    if engine == "vllm" and mode == "head":
        settings += [f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.head_dtype=float32"]
    if engine == "sglang" and mode == "head":
        settings += [f"+{ROLLOUT}.engine_kwargs.sglang.enable_fp32_lm_head=true"]
    return settings + work["more"]


def prompts(path: Path, rows: int, width: int) -> list[list[int]]:
    """Different prompts: questions where the model has a tokenizer, random tokens where it has none."""
    import random

    draw, vocab = random.Random(0), json.loads((path / "config.json").read_text())["vocab_size"]
    if not (path / "tokenizer.json").exists():
        return [[draw.randrange(vocab) for _ in range(draw.randint(width // 2, width))] for _ in range(rows)]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    texts = [f"{TASKS[n % 8]} {THINGS[n // 8 % 8]}{'!' * (n // 64)}" for n in range(rows)]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [ids[-width:] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def report(what: str, **about: Any) -> None:
    print(MARK + json.dumps({"what": what, **about}), flush=True)


class Side:
    """What one process does: an engine and a trainer with the same weights, and one batch of prompts."""

    def __init__(self, work: dict[str, Any]) -> None:
        from rlsys.config import load_config
        from rlsys.config.engines import worker_class
        from rlsys.rollout.batch import to_requests
        from workers.build import EngineRun, build_actor_engine

        cfg = load_config(overrides(work))
        run = EngineRun(device=work["device"], nccl_timeout_s=60.0)
        policy = cfg.actor_rollout_ref
        self.trainer = build_actor_engine(policy, run)
        worker = worker_class(policy.rollout.name)(policy.model, policy.rollout, run, "auto")
        worker.init_model()
        self.engine, self.work = worker.engine, work
        self.batch = prompt_rows(prompts(Path(work["path"]), work["rows"], work["prompt"]), work)
        self.requests = to_requests(self.batch)

    def sample(self) -> tuple[list[Any], float]:
        """The answers and the tokens a second."""
        started_s = perf_counter()
        answers = self.engine.generate(self.requests)
        return answers, sum(len(answer.output_tokens) for answer in answers) / (perf_counter() - started_s)

    def resample(self) -> list[Any]:
        """The same rows in other batches and another order: one alone, a few, the others."""
        rows = list(reversed(range(len(self.requests))))
        cuts = (0, 1, 1 + len(rows) // 3, len(rows))
        answers: dict[int, Any] = {}
        for start, end in pairwise(cuts):
            part = rows[start:end]
            answers |= dict(zip(part, self.engine.generate([self.requests[row] for row in part]), strict=True))
        return [answers[row] for row in range(len(rows))]

    def rows(self, answers: list[Any]) -> Any:
        from rlsys.rollout.batch import from_responses

        return from_responses(self.batch, answers)

    def train_scores(self, rows: Any) -> tuple[Any, float]:
        started_s = perf_counter()
        log_probs = self.trainer.forward(rows, ("log_probs",))["log_probs"].cpu()
        return log_probs, int(rows.tensors["attention_mask"].sum()) / (perf_counter() - started_s)

    def compare(self, answers: list[Any], again: list[Any], ours: Any) -> dict[str, Any]:
        """All that is not timed; `ours` are the trainer's log-probabilities."""
        import torch

        from rlsys.algorithms.mismatch import compare_log_probs

        rows = self.rows(answers)
        seen, mask = rows.tensors["rollout_log_probs"], rows.tensors["response_mask"]
        scored = self.engine.compute_log_prob(rows)
        order = torch.arange(len(rows)).flip(0)
        other = torch.cat([self.train_scores(rows[part])[0] for part in order.split(3)])[order.argsort()]
        parity, counted = compare_log_probs(ours, seen, mask), mask.bool()
        return {
            "mean": parity.mean_abs,
            "max": parity.max_abs,
            "k3": parity.k3,
            "over": ((ours - seen).abs() > 0.01)[counted].double().mean().item(),
            "scored": compare_log_probs(ours, scored, mask).mean_abs,
            "engine_itself": compare_log_probs(seen, scored, mask).mean_abs,
            "repeat": same(answers, again),
            "batch": same(answers, self.resample()),
            "trainer": (ours == other)[counted].double().mean().item(),
            "num_tokens": parity.num_tokens,
        }


def prompt_rows(ids: list[list[int]], work: dict[str, Any]) -> Any:
    """Left-padded prompts, as a trainer sends them to a rollout."""
    import torch

    from rlsys.protocol import DataProto

    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    batch = DataProto.from_dict({"input_ids": padded, "attention_mask": mask, "position_ids": places})
    batch.meta_info |= {"response_length": work["tokens"], "pad_token_id": 0, "temperature": 1.0, "ignore_eos": True}
    batch.meta_info |= {"do_sample": True, "seed": 7, "global_steps": 0, "eos_token_id": []}
    return batch


def same(answers: list[Any], others: list[Any]) -> float:
    """The share of tokens that are equal, with bitwise equal log-probabilities."""
    pairs = [
        (a.output_tokens[i], a.output_logprobs[i]) == (b.output_tokens[i], b.output_logprobs[i])
        for a, b in zip(answers, others, strict=True)
        for i in range(len(a.output_tokens))
    ]
    return sum(pairs) / len(pairs)


def alone(work: dict[str, Any]) -> None:
    """One process: start, sample and compare on request."""
    started_s = perf_counter()
    side = Side(work)
    report("ready", start_s=perf_counter() - started_s)
    sys.stdin.readline()
    warm, _ = side.sample()
    answers, rate = side.sample()
    rows = side.rows(answers)
    side.train_scores(rows)
    ours, trainer_rate = side.train_scores(rows)
    report("timed", rate=rate, trainer_rate=trainer_rate)
    sys.stdin.readline()
    report("done", **side.compare(answers, warm, ours))
    side.engine.close()
    os._exit(0)


class Child:
    """One such process, seen from outside."""

    def __init__(self, work: dict[str, Any], out: Path) -> None:
        self.work, self.result = work, {key: work[key] for key in ("model", "engine", "mode")}
        self.log = out / f"{work['model']}-{work['engine']}-{work['mode']}.log"
        command = [sys.executable, str(Path(__file__).resolve()), "--alone", json.dumps(work)]
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(work["port"])}
        cache = {"VLLM_CACHE_ROOT": str(self.log.with_suffix(".cache").resolve())}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **rank, **meeting, **cache},
                start_new_session=True,
            )

    def wait(self, what: str) -> None:
        """Read its next report; if it ended instead, record that as its problem."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.result |= json.loads(line.removeprefix(MARK))
                assert self.result.pop("what") == what
                return
        self.result.setdefault("problem", f"ended before '{what}': {self.log}")

    def go(self) -> None:
        if "problem" not in self.result:
            assert self.process.stdin is not None
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def measure(works: list[dict[str, Any]], out: Path, deadline_s: float) -> list[dict[str, Any]]:
    """All processes: started together, timed one after the other, compared together."""
    children = [Child(work, out) for work in works]
    timer = threading.Timer(deadline_s, lambda: [child.kill() for child in children])
    timer.start()
    try:
        for child in children:
            child.wait("ready")
        for child in children:
            child.go()
            if "problem" not in child.result:
                child.wait("timed")
        for child in children:
            child.go()
        for child in children:
            if "problem" not in child.result:
                child.wait("done")
            print(json.dumps(child.result), flush=True)
    finally:
        timer.cancel()
        for child in children:
            child.kill()
    return [child.result for child in children]


def table(results: list[dict[str, Any]]) -> str:
    """Rows of the same widths; a process that failed says so."""

    def cell(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value < 0.01 else f"{value:.4f}"

    lines = [list(COLUMNS.values())]
    for row in results:
        lines += [[cell(row.get(key, row.get("problem", "") if key == "mean" else "")) for key in COLUMNS]]
    widths = [max(len(line[at]) for line in lines) for at in range(len(COLUMNS))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def plan(args: argparse.Namespace, more: list[str]) -> list[dict[str, Any]]:
    """What each process is to do; the hf engine has no head apart from its aligned mode."""
    from rlsys.single_controller.worker import free_port

    models = {Path(path).name: Path(path).resolve() for path in args.model}
    models |= {shape: random_model(shape, args.out / shape, args.device) for shape in args.shape}
    fixed = {name: getattr(args, name) for name in ("rows", "tokens", "prompt", "device", "dtype", "strategy")}
    works = [
        fixed | {"model": name, "path": str(path), "engine": engine, "mode": mode, "more": more}
        for name, path in models.items()
        for engine in args.engines
        for mode in args.modes
        if (engine, mode) != ("hf", "head")
    ]
    return [work | {"port": free_port()} for work in works]


def random_model(shape: str, folder: Path, device: str) -> Path:
    """Random weights of a known shape, written once."""
    from safetensors import safe_open
    from train_step import write_checkpoint  # pyrefly: ignore[missing-import]

    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(shape, folder, device)
        names = {file.name: list(safe_open(file, "pt").keys()) for file in folder.glob("*.safetensors")}
        where = {name: file for file, held in names.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder.resolve()


def main() -> int:
    cache = Path(os.environ.get("RLSYS_CACHE", Path.home() / ".cache" / "rlsys"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    parser.add_argument("--model", nargs="*", default=[cache / "models" / "SmolLM2-135M-Instruct"])
    parser.add_argument("--shape", nargs="*", default=[], help="random weights of these shapes, e.g. 0.5B")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=None, help="those installed")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=["default", "aligned"])
    parser.add_argument("--strategy", choices=["fsdp", "megatron"], default="fsdp")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="longest prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--deadline-s", type=float, default=400.0)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    if args.alone:
        alone(json.loads(args.alone))
        return 0
    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.engines = args.engines or [name for name in ENGINES if name == "hf" or find_spec(name)]
    args.out.mkdir(parents=True, exist_ok=True)
    started_s = perf_counter()
    results = measure(plan(args, sys.argv[split + 1 :]), args.out, args.deadline_s)
    text = table(results)
    print(text, f"{perf_counter() - started_s:.0f} s", sep="\n")
    (args.out / "parity.json").write_text(json.dumps(results, indent=1))
    (args.out / "parity.txt").write_text(text + "\n")
    return int(any("problem" in row for row in results))


if __name__ == "__main__":
    raise SystemExit(main())
