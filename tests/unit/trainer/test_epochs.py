"""Reproducible asynchronous training over real engines: equal bits at any speed, and the version of every token."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.protocol import DataProto, response_lengths
from rlsys.rewards.manager import Graded
from rlsys.rollout.base import DEFAULT_CONFIG
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import ModelRequest, ResponseDelta
from rlsys.utils.errors import DeadlineError
from tests.timing import scaled_s
from tests.unit.trainer.asynchronous import LengthManager, LengthReplica, exit_code_after, fleet_over, prompt_groups
from trainer.async_source import AsyncSource
from trainer.epochs import EpochSource
from trainer.prompt_groups import OpenAnswers
from trainer.source import GroupFilter
from trainer.staleness_window import StalenessWindow

VOCABULARY, MAX_TOKENS, PER_STEP = 40, 24, 4


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=2,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


class EngineReplica:
    """An engine in this process; every exchange is late by up to `delay_s`, and it is lost in those of `lost_in`."""

    def __init__(
        self, name: str, delay_s: float, lost_in: Collection[int] = (), config: GenerationConfig = DEFAULT_CONFIG
    ) -> None:
        self.name, self.delay_s, self.random = name, delay_s, random.Random(name)
        self.lost_in, self.num_exchanges, self.num_restarts, self.is_lost = lost_in, 0, 0, False
        self.engine = HFRollout(small_model(), config)

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> Sequence[ResponseDelta]:
        time.sleep(self.random.uniform(0, self.delay_s))
        self.num_exchanges += 1
        deltas = self.engine.exchange(new, wait_s=wait_s, cancel=cancel)
        self.is_lost = self.num_exchanges in self.lost_in
        self.health(deadline_s)
        return deltas

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        if self.is_lost:
            raise ConnectionError("the process is gone, and with it the tokens of this exchange")
        return self.engine.health()

    def restart(self, deadline_s: float) -> None:
        lost, self.engine = self.engine, HFRollout(small_model(), GenerationConfig())
        self.engine.begin_update()
        self.engine.model.load_state_dict(lost.model.state_dict())
        self.engine.finish_update(lost.version)
        lost.close()
        self.is_lost = False
        self.num_restarts += 1


class Trainer:
    """A model whose weights after each step depend on every token and log-probability that it was trained on."""

    def __init__(self, replicas: Sequence[EngineReplica]) -> None:
        self.model, self.replicas, self.version = small_model(), replicas, 0
        self.weights: list[Mapping[str, Tensor]] = []

    def push(self, fleet: Any, source: EpochSource | AsyncSource) -> None:
        source.settle()
        self.weights.append(deepcopy(self.model.state_dict()))
        with fleet.pushing(self.version):
            for replica in self.replicas:
                replica.engine.begin_update()
                replica.engine.model.load_state_dict(self.model.state_dict())
                replica.engine.finish_update(self.version)
        source.published(self.version)

    def train(self, batch: DataProto) -> None:
        seen = [batch.tensors[name].double().sum().item() for name in ("responses", "rollout_log_probs")]
        draw = torch.Generator().manual_seed(hash(tuple(seen)) % 2**31)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
        self.version += 1

    def score(self, version: int, row: DataProto) -> Tensor:
        """Log-probs of the answer under the weights of a version."""
        model = small_model()
        model.load_state_dict(self.weights[version])
        length = int(response_lengths(row)[0])
        width = row.tensors["prompts"].shape[1]
        ids = row.tensors["input_ids"][:, : width + length]
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)[0, width - 1 : -1]
        return log_probs.gather(1, ids[0, width:, None]).squeeze(1)


def varied(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Keep a prompt whose answers have different lengths."""
    differ = len(set(response_lengths(batch).tolist())) > 1
    return batch[: len(batch) if differ else 0], {"training/filter_groups_kept": float(differ)}


def batches_of(
    kind: type[EpochSource] | type[AsyncSource],
    num_replicas: int,
    *,
    max_staleness: int,
    num_steps: int = 6,
    delay_s: float = 0.0,
    max_num_seqs: int = 256,
    lost_in: Sequence[Collection[int]] = ((), (), ()),
    folder: Path | None = None,
    group_filter: GroupFilter | None = None,
    lookahead: int = 0,
) -> tuple[list[DataProto], Trainer]:
    """The batches of a run; with a `folder` each step is made by a source that continues from a checkpoint."""
    window = {"groups_per_step": PER_STEP, "max_staleness": max_staleness, "lookahead": lookahead}
    # after a push a token has the log-prob of one version only if its cache is computed again; epochs leave none open
    on_update = "recompute" if kind is AsyncSource else "keep"
    config = GenerationConfig(max_num_seqs=max_num_seqs, on_update=on_update)
    replicas = [EngineReplica(f"replica {n}", delay_s, lost_in[n], config) for n in range(num_replicas)]
    trainer, batches = Trainer(replicas), []

    def source_over(fleet: Any) -> EpochSource | AsyncSource:
        groups = prompt_groups(
            StalenessWindow(**window),
            max_tokens=MAX_TOKENS,
            num_answers=2,
            vocabulary=VOCABULARY,
            group_filter=group_filter,
        )
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS} if kind is EpochSource else {}
        return kind(OpenAnswers(groups, fleet), deadline_s=scaled_s(30.0), **options)

    with fleet_over(replicas, chunk_rows=3) as fleet, ExitStack() as stack:
        source = source_over(fleet)
        trainer.push(fleet, source)
        for _ in range(num_steps):
            batches.append(source.next())
            trainer.train(batches[-1])
            trainer.push(fleet, source)
            if folder is not None:
                state = json.loads(json.dumps(source.save(folder)))
                source.close()
                source = source_over(fleet)
                source.load(state, folder)
                source.published(trainer.version)
        stack.callback(source.close)
    for replica in replicas:
        replica.engine.close()
    return batches, trainer


def bits_of(batches: Sequence[DataProto]) -> list[tuple[Any, ...]]:
    names = ("responses", "rollout_log_probs", "weight_versions", "token_level_scores")
    return [
        (batch.non_tensor_batch["uid"].tolist(), *(batch.tensors[name].numpy().tobytes() for name in names))
        for batch in batches
    ]


@pytest.mark.parametrize(("max_staleness", "lookahead"), [(1, 0), (3, 0), (3, 1)])
def test_the_bits_depend_on_neither_speed_nor_replicas_nor_losses_nor_restarts(
    tmp_path: Path, max_staleness: int, lookahead: int
) -> None:
    settings: dict[str, Any] = {
        "max_staleness": max_staleness,
        "lookahead": lookahead,
        "group_filter": GroupFilter(varied, 0),
    }
    batches, trainer = batches_of(EpochSource, 1, **settings)
    others, other = batches_of(EpochSource, 3, **settings, delay_s=0.02, lost_in=((2, 7), (4,), ()))
    assert [replica.num_restarts for replica in other.replicas] == [2, 1, 0]
    assert bits_of(others) == bits_of(batches)
    resumed, _ = batches_of(EpochSource, 2, **settings, folder=tmp_path)
    assert bits_of(resumed) == bits_of(batches)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name]), name
    assert batches[-1].meta_info["source_metrics"]["rollout/groups_skipped_filtered"] > 0


class MortalReplica(EngineReplica):
    """A replica that reports its exchanges and the end of its updates before they are made."""

    def __init__(self, name: str, on_event: Callable[[str], None]) -> None:
        super().__init__(name, 0.0)
        self.on_event, finish_update = on_event, self.engine.finish_update

        def reported(version: int) -> None:
            on_event(f"push to {name}")
            finish_update(version)

        self.engine.finish_update = reported  # type: ignore[method-assign]

    def exchange(self, new: Sequence[ModelRequest], **options: Any) -> Sequence[ResponseDelta]:
        self.on_event("exchange")
        return super().exchange(new, **options)


def run_until(folder: Path, killed_at: tuple[str, int], num_steps: int = 6) -> None:
    """Continue the run of a folder from its last checkpoint until it ends or is killed at the n-th event of a name."""
    counts = Counter[str]()

    def on_event(name: str) -> None:
        counts[name] += 1
        if (name, counts[name]) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    replicas = [MortalReplica(name, on_event) for name in ("one", "other")]
    trainer = Trainer(replicas)
    window = StalenessWindow(groups_per_step=PER_STEP, max_staleness=3, lookahead=1)
    limits = {"max_tokens": MAX_TOKENS, "num_answers": 2, "vocabulary": VOCABULARY}
    groups = prompt_groups(window, **limits, group_filter=GroupFilter(varied, 0))
    with fleet_over(replicas, chunk_rows=3) as fleet:
        source = EpochSource(OpenAnswers(groups, fleet), deadline_s=scaled_s(30.0), max_tokens=MAX_TOKENS)
        if (last := folder / "last").exists():
            saved = folder / last.read_text()
            trainer.version = int(saved.name)
            trainer.model.load_state_dict(load_file(saved / "model.safetensors"))
            source.load(json.loads((saved / "state.json").read_text()), saved)
        trainer.push(fleet, source)
        while trainer.version < num_steps:
            batch = source.next()
            on_event("batch")
            trainer.train(batch)
            trainer.push(fleet, source)
            saved = folder / str(trainer.version)
            saved.mkdir(exist_ok=True)
            (saved / "batch").write_text(repr(bits_of([batch])))
            save_file(trainer.model.state_dict(), saved / "model.safetensors")
            (saved / "state.json").write_text(json.dumps(source.save(saved)))
            on_event("save")
            (folder / "next").write_text(saved.name)
            (folder / "next").rename(last)
            on_event("saved")


def test_kill_9_at_twenty_points_changes_no_bit(tmp_path: Path) -> None:
    """Processes that are killed in and between exchanges, between the pushes to two replicas and around saves."""
    never, exit_codes = ("", 0), []
    points = [
        point
        for n in (2, 6, 11, 17)
        for point in (("exchange", n), ("batch", 1), ("push to other", 2), ("save", 1), ("saved", 1))
    ]
    runs = [("whole", never), *(("killed", point) for point in points), ("killed", never)]
    for name, point in runs:
        (tmp_path / name).mkdir(exist_ok=True)
        process = get_context("fork").Process(target=run_until, args=(tmp_path / name, point))
        process.start()
        process.join(scaled_s(60))
        exit_codes.append(process.exitcode)
    assert exit_codes == [0, *[-signal.SIGKILL] * 20, 0]
    for step in range(1, 7):
        for file in ("batch", "model.safetensors"):
            whole, killed = (tmp_path / name / str(step) / file for name in ("whole", "killed"))
            assert killed.read_bytes() == whole.read_bytes(), (step, file)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_versions_follow_from_the_step_and_the_position(max_staleness: int) -> None:
    batches, _ = batches_of(EpochSource, 2, max_staleness=max_staleness)
    per_epoch = -(-MAX_TOKENS // max_staleness)
    for step, batch in enumerate(batches, start=1):
        epochs = torch.arange(MAX_TOKENS) // per_epoch
        expected = (step - 1 - max_staleness + epochs).clamp(min=0).expand_as(batch.tensors["weight_versions"])
        mask = batch.tensors["response_mask"].bool()
        assert torch.equal(batch.tensors["weight_versions"][mask], expected[mask])


@pytest.mark.parametrize("kind", [EpochSource, AsyncSource])
def test_every_token_was_drawn_by_the_version_it_is_stamped_with(kind: type[EpochSource] | type[AsyncSource]) -> None:
    batches, trainer = batches_of(kind, 2, max_staleness=3, num_steps=8, delay_s=0.01, max_num_seqs=3)
    num_mixed = 0
    for batch in batches:
        for row in range(len(batch)):
            answer = batch[row : row + 1]
            length = int(response_lengths(answer)[0])
            versions = answer.tensors["weight_versions"][0, :length]
            num_mixed += len(versions.unique()) > 1
            drawn = answer.tensors["rollout_log_probs"][0, :length]
            scored = {v: trainer.score(v, answer) for v in range(len(trainer.weights) - 1)}
            for at, version in enumerate(versions.tolist()):
                assert abs(scored[version][at] - drawn[at]) < 1e-4
                nearest = min(scored, key=lambda v: abs(float(scored[v][at] - drawn[at])))
                assert nearest == version
    assert num_mixed > 0  # three answers at a time: some are in progress at every push


class HangingManager(LengthManager):
    """A judge that never answers."""

    def grade(self, data: DataProto) -> Graded:
        threading.Event().wait()
        raise AssertionError


def test_a_grader_that_hangs_does_not_keep_the_process() -> None:
    def work() -> None:
        window = StalenessWindow(groups_per_step=1, max_staleness=1)
        groups = prompt_groups(window, max_tokens=8, manager=HangingManager())
        with fleet_over([LengthReplica("replica", lambda n: 8)]) as fleet:
            source = EpochSource(OpenAnswers(groups, fleet), deadline_s=0.1, max_tokens=8)
            source.published(0)
            with pytest.raises(DeadlineError, match="generate an epoch"):
                source.next()
            source.close()

    assert exit_code_after(work) == 0
