"""Remote engines against real vLLM and SGLang servers on CPU, started by our scripts.

RLSYS_VLLM_PYTHON and RLSYS_SGLANG_PYTHON name interpreters that have them; without one its tests are skipped.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rlsys.fleet.external.engine import SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.rollout.batch import from_responses
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams, WeightUpdateMeta
from tests.e2e.conftest import Toy
from tests.e2e.test_vision import arguments as vision_arguments
from tests.start_tokenizer import build_tokenizer
from tests.timing import wait_until
from tests.tiny_vision import MODELS, wide
from trainer.main_ppo import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PYTHONS = {"vllm": "RLSYS_VLLM_PYTHON", "sglang": "RLSYS_SGLANG_PYTHON"}
OPTIONS = {
    "vllm": ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"],
    "sglang": ["--dtype", "float32", "--mem-fraction-static", "0.1", "--max-total-tokens", "65536"],
}
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
START_S = 600
SECRET = "a-token-for-the-tests"


@dataclass(frozen=True)
class Models:
    """Two models of one shape, and the servers' tokenizer beside each."""

    folders: tuple[Path, Path]
    models: tuple[Any, Any]

    def logprobs(self, response: ModelResponse, temperature: float) -> list[float]:
        """What the model of each token's version says of it; version 2 and 0 are the first model."""
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        with torch.inference_mode():
            both = [torch.log_softmax(m(ids).logits[0].double() / temperature, -1) for m in self.models]
        first = len(response.input_tokens) - 1
        pairs = zip(response.output_tokens, response.output_versions, strict=True)
        return [float(both[version % 2][first + at, token]) for at, (token, version) in enumerate(pairs)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    config = Qwen2Config(
        vocab_size=262,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    made = []
    for number in range(2):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(root / f"m{number}")
        build_tokenizer().save_pretrained(str(root / f"m{number}"))
        made.append(model.eval())
    return Models((root / "m0", root / "m1"), (made[0], made[1]))


@contextmanager
def served(kind: str, script: str, model: Path, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """The address of a server that a script of ours started, ended with its children afterwards."""
    python = os.environ.get(PYTHONS[kind])
    if not python:
        pytest.skip(f"{PYTHONS[kind]} is not set")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"PYTHON": python, "PORT": str(port), "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own |= {"RLSYS_SERVER_TOKEN": SECRET, "PROCESS_GROUP": "1", **environment}
    with log.open("w") as out:
        process = subprocess.Popen(
            [SCRIPTS / script, model, *OPTIONS[kind], *options],
            env=os.environ | own,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        end_s = time.monotonic() + START_S
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() > end_s:
                pytest.fail(f"the server did not come up: {log.read_text()[-4000:]}")
            time.sleep(2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            return answer.status == 200
    except OSError:
        return False


@dataclass(frozen=True)
class Real:
    kind: str
    url: str
    engine: SGLangRemoteEngine | VLLMRemoteEngine


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def real(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    kind = request.param
    script = {"vllm": "run_vllm_base.sh", "sglang": "run_sglang.sh"}[kind]
    log = tmp_path_factory.mktemp(kind) / "server.log"
    with served(kind, script, models.folders[0], log) as url:
        make = VLLMRemoteEngine if kind == "vllm" else SGLangRemoteEngine
        engine = make(RemoteSettings((url,), token=SECRET, request_s=300))
        engine.connect()
        yield Real(kind, url, engine)
        engine.close()


def requests_of(num: int, params: SamplingParams) -> list[ModelRequest]:
    return [ModelRequest((5, 6, 7 + number, 9), params, rid=f"r{number}") for number in range(num)]


def assert_as_model(models: Models, response: ModelResponse, temperature: float) -> None:
    expected = models.logprobs(response, temperature)
    assert response.output_logprobs == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_models(real: Real, models: Models, temperature: float) -> None:
    params = SamplingParams(24, temperature=temperature, ignore_eos=True)
    for response in real.engine.generate(requests_of(6, params)):
        assert (len(response.output_tokens), response.stop_reason) == (24, Finish.LENGTH)
        assert_as_model(models, response, temperature)


def test_greedy_and_stop_tokens(real: Real, models: Models) -> None:
    (request,) = requests_of(1, SamplingParams(24, temperature=0.0, ignore_eos=True))
    (whole,) = real.engine.generate([request])
    assert_as_model(models, whole, 1.0)
    assert whole.sampled_logprobs == (0.0,) * 24
    stop = whole.output_tokens[5]
    least = whole.output_tokens.index(stop)
    stopping = replace(request, gconfig=SamplingParams(24, temperature=0.0, stop_token_ids=(stop,)))
    (cut,) = real.engine.generate([stopping])
    if 1 not in whole.output_tokens[:least]:
        assert cut.output_tokens == whole.output_tokens[: least + 1]
    assert cut.stop_reason is Finish.STOP


def test_a_request_that_cannot_be_served_is_named(real: Real) -> None:
    with pytest.raises(ValueError, match="culprit"):
        real.engine.generate([ModelRequest((3,) * 5000, SamplingParams(4), rid="culprit")])


def test_scores_are_the_models(real: Real, models: Models) -> None:
    from rlsys.protocol import DataProto

    answers = real.engine.generate(requests_of(3, SamplingParams(10)))
    prompts = torch.tensor([answer.input_tokens for answer in answers])
    meta = {"response_length": 12, "pad_token_id": 0}
    rows = {"prompts": prompts, "attention_mask": torch.ones_like(prompts)}
    batch = from_responses(DataProto.from_dict(rows, meta_info=meta), answers)
    scores = real.engine.compute_log_prob(batch).batch["rollout_log_probs"]
    torch.testing.assert_close(scores, batch.batch["rollout_log_probs"], atol=2e-3, rtol=0)


Asked = list[tuple[int, Future[ModelResponse]]]
"""Lengths and answers of requests."""


@contextmanager
def kept_busy(real: Real) -> Iterator[Asked]:
    """Six requests at any time, whose answers end one after another and are followed by others."""
    asked: Asked = []
    is_on = True

    def submit(num: int) -> None:
        request = ModelRequest((5, 6, 7, 9), SamplingParams(num, ignore_eos=True), rid=f"r{len(asked)}")
        (answer,) = real.engine.submit([request])
        asked.append((num, answer))
        answer.add_done_callback(lambda _: submit(num) if is_on else None)

    try:
        for num in range(1000, 2200, 200):
            submit(num)
        yield asked
    finally:
        is_on = False


def wait_for_versions(real: Real, asked: Asked, *versions: int) -> None:
    """Wait until the last tokens of one answer have these versions."""

    def is_seen() -> bool:
        given = [one.versions for one in real.engine.unfinished()]
        given += [answer.result().output_versions for _, answer in list(asked) if answer.done()]
        return any(tuple(dict.fromkeys(of))[-len(versions) :] == versions for of in given)

    assert wait_until(is_seen, 120)


def test_weights_change_in_flight_and_nothing_is_lost(real: Real, models: Models) -> None:
    """Each token has the log-probability of the model whose version it bears."""
    with kept_busy(real) as asked:
        wait_for_versions(real, asked, 0)
        for version in (1, 2):
            folder = str(models.folders[version % 2])
            real.engine.update_weights(WeightUpdateMeta(version, weights_path=folder)).result(120)
            wait_for_versions(real, asked, version - 1, version)
    for num, answer in asked:
        response = answer.result(240)
        assert len(response.output_tokens) == num
        assert_as_model(models, response, 1.0)


def test_without_the_token_nothing_is_answered(real: Real) -> None:
    other = type(real.engine)(RemoteSettings((real.url,), start_s=3))
    try:
        with pytest.raises((TimeoutError, RuntimeError), match="token is missing or wrong"):
            other.generate(requests_of(1, SamplingParams(2)))
    finally:
        other.close()


def overrides(toy: Toy, model: Path, out: Path, url: str, *more: str) -> list[str]:
    return toy.overrides(
        out,
        f"actor_rollout_ref.model.path={model}",
        "trainer.backend=local",
        "trainer.total_training_steps=2",
        f"actor_rollout_ref.rollout.servers.urls=[{url}]",
        f"reward.custom_reward_function.path={toy.grader}",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        *more,
    )[1:]


def check_run(out: Path) -> None:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["training/rollout_probs_diff_max"] < 2e-3
        assert line["actor/grad_norm"] > 0


@pytest.mark.parametrize("transfer", ["disk", "nccl"])
def test_training_follows_the_server(
    real: Real, models: Models, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer: str
) -> None:
    monkeypatch.setenv("RLSYS_SERVER_TOKEN", SECRET)
    more = (
        f"inference.backend={real.kind}",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={transfer}",
        f"actor_rollout_ref.rollout.servers.weights_dir={tmp_path}/served",
    )
    assert main(overrides(toy, models.folders[0], tmp_path / "out", real.url, *more)) == 0
    assert (tmp_path / "served").exists() is (transfer == "disk")
    check_run(tmp_path / "out")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_images_are_read_with_the_weights_that_are_pushed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tower included: each step's answers have the trainer's log-probs, and text goes beside images."""
    monkeypatch.setenv("RLSYS_SERVER_TOKEN", SECRET)
    given = vision_arguments(tmp_path, "trainer.backend=local", config=wide(MODELS["qwen2_5_vl"]))
    script = {"vllm": "run_vllm_base.sh", "sglang": "run_sglang.sh"}[kind]
    short = ["--max-model-len", "512"] if kind == "vllm" else []
    with served(kind, script, tmp_path / "model", tmp_path / "server.log", *short, IMAGES="1") as url:
        for transfer in ("nccl", "disk"):
            out = tmp_path / transfer
            more = (
                f"actor_rollout_ref.rollout.name={kind}_remote",
                f"actor_rollout_ref.rollout.servers.urls=[{url}]",
                f"actor_rollout_ref.rollout.servers.weights_dir={tmp_path}/served",
                f"actor_rollout_ref.rollout.checkpoint_engine.backend={transfer}",
                "actor_rollout_ref.rollout.parity.freq=-1",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "trainer.total_training_steps=3",
                "trainer.test_freq=3",
                f"trainer.default_local_dir={out}",
            )
            assert main([*given, *more]) == 0
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            steps = [line for line in lines if "training/rollout_probs_diff_max" in line]
            assert len(steps) == 3
            assert max(line["training/rollout_probs_diff_max"] for line in steps) < 1e-4


ADAPTERS = {
    "vllm": ("run_vllm_training.sh",),
    "sglang": (
        "run_sglang.sh",
        "--lora-backend",
        "torch_native",
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--lora-target-modules",
        *PROJECTIONS,
    ),
}
UNPINNED = """
import runpy, torch
runpy.run_path({shells!r})
torch.Tensor.pin_memory = lambda tensor, *_: tensor
for name in ("empty", "tensor", "zeros", "ones"):
    make = getattr(torch, name)
    setattr(torch, name, lambda *args, make=make, pin_memory=False, **more: make(*args, **more))
"""
"""SGLang's adapters ask for pinned memory, which only CUDA has."""


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_adapters_trained_here_are_served_live(
    kind: str, models: Models, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSYS_SERVER_TOKEN", SECRET)
    shells = str(SCRIPTS / "sglang_cpu" / "sitecustomize.py")
    (tmp_path / "sitecustomize.py").write_text(UNPINNED.format(shells=shells))
    own = {"PYTHONPATH": f"{tmp_path}:{SCRIPTS.parent}"} if kind == "sglang" else {}
    script, *options = ADAPTERS[kind]
    with served(kind, script, models.folders[0], tmp_path / "server.log", *options, **own) as url:
        more = (f"actor_rollout_ref.rollout.name={kind}_remote", "actor_rollout_ref.rollout.servers.lora_name=actor")
        arguments = overrides(
            toy, models.folders[0], tmp_path / "out", url, *more, "actor_rollout_ref.model.lora_rank=8"
        )
        assert main(arguments) == 0
        check_run(tmp_path / "out")
