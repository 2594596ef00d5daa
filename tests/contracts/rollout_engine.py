"""What every RolloutEngine owes its callers, as a suite that a package with an engine of its own can run.

from tests.contracts.rollout_engine import Bench, RolloutEngineContract, tiny_model

class TestMyEngine(RolloutEngineContract):
    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        model = tiny_model()
        engine = MyEngine(tiny_model())
        yield Bench(engine, lambda ids: model(ids[None]).logits[0].detach())
        engine.close()
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from rlsys.interfaces import RolloutEngine
from rlsys.protocol import DataProto
from rlsys.rollout import base
from rlsys.rollout.batch import from_responses, generate_sequences
from rlsys.rollout.partial import PartialResponse, complete
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams
from rlsys.utils.errors import WeightTransferError
from tests.timing import scaled_s, wait_until

VOCABULARY, EOS = 96, 2


@dataclass
class Bench:
    """An engine, what it `lacks`, and the float32 model that it must agree with: `logits` (T,) -> (T, V)."""

    engine: RolloutEngine
    logits: Callable[[Tensor], Tensor]
    lacks: frozenset[str] = frozenset()
    close: Callable[[], None] = field(default=lambda: None)

    def needs(self, what: str) -> None:
        if what in self.lacks:
            pytest.skip(f"this engine has no {what}")


def tiny_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=EOS,
            initializer_range=0.15,
        )
    )
    return model.eval()


def requests_of(num: int, params: SamplingParams, *, shortest: int = 1) -> list[ModelRequest]:
    """Different prompts of different lengths, each with its own seed."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCABULARY, (shortest + 3 * i % 17,), generator=generator).tolist() for i in range(num)]
    return [
        ModelRequest(tuple(ids), replace(params, seed=params.seed + i), rid=f"r{i}") for i, ids in enumerate(prompts)
    ]


def tokens_of(responses: list[ModelResponse]) -> list[tuple[int, ...]]:
    return [response.output_tokens for response in responses]


def reference_logprobs(bench: Bench, response: ModelResponse, temperature: float) -> Tensor:
    """Full log-probabilities (R, V) before each output token."""
    ids = torch.tensor(response.input_tokens + response.output_tokens)
    logits = bench.logits(ids)[len(response.input_tokens) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


def at_tokens(logprobs: Tensor, response: ModelResponse) -> Tensor:
    return logprobs.gather(1, torch.tensor(response.output_tokens)[:, None]).squeeze(1)


def check_logprobs(bench: Bench, responses: list[ModelResponse], temperature: float = 1.0) -> None:
    """The full log-probabilities of responses are the model's."""
    for response in responses:
        expected = at_tokens(reference_logprobs(bench, response, temperature), response)
        torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def shadow_logprobs(
    models: Mapping[int, Qwen3ForCausalLM], response: ModelResponse, versions: Sequence[int], *, keeps: bool
) -> Tensor:
    """Log-probabilities (R,) of the tokens by their versions; `keeps`: over the cache of earlier ones."""
    ids, cache = torch.tensor(response.input_tokens + response.output_tokens), DynamicCache()
    at, parts = len(response.input_tokens), []
    for version, group in itertools.groupby(versions):
        num = len(list(group))
        cache = cache if keeps else DynamicCache()
        inputs = ids[cache.get_seq_length() : at + num - 1]
        logits = models[version](inputs[None], past_key_values=cache).logits[0, -num:].double()
        parts.append(torch.log_softmax(logits, -1).gather(1, ids[at : at + num, None]).squeeze(1))
        at += num
    return torch.cat(parts)


@dataclass
class Driver:
    """Drives an engine as a fleet does: exchange by exchange, over updates."""

    engine: RolloutEngine
    partials: dict[str, PartialResponse] = field(default_factory=dict)
    again: list[ModelRequest] = field(default_factory=list)

    def exchange(self, new: Sequence[ModelRequest] = (), *, wait_s: float = 0.1, cancel: Sequence[str] = ()) -> None:
        self.partials |= {request.rid: PartialResponse(request) for request in new}
        again, self.again = self.again, []
        for delta in self.engine.exchange([*new, *again], wait_s=wait_s, cancel=cancel):
            partial = self.partials[delta.rid]
            assert not delta.error
            assert len(delta.tokens) == len(delta.logprobs) == len(delta.sampled_logprobs) == len(delta.versions)
            partial.add(delta)
            if delta.finish is Finish.ABORT:
                self.again.append(partial.rest(delta.rid))

    def until(self, reached: Callable[[PartialResponse], bool], *, wait_s: float = 0.1) -> None:
        end_s = time.monotonic() + scaled_s(60)
        while not all(map(reached, self.partials.values())):
            assert time.monotonic() < end_s, self.partials
            self.exchange(wait_s=wait_s)

    def finish(self, *, wait_s: float = 0.1) -> list[ModelResponse]:
        self.until(lambda partial: partial.finish is not None, wait_s=wait_s)
        return [partial.response() for partial in self.partials.values()]


def prompt_batch(requests: list[ModelRequest], **meta: object) -> DataProto:
    width = max(len(request.input_ids) for request in requests) + 2
    pads = [width - len(request.input_ids) for request in requests]
    prompts = torch.tensor([[0] * pad + list(r.input_ids) for pad, r in zip(pads, requests, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
    defaults = {"response_length": 24, "pad_token_id": 0, "eos_token_id": EOS, "seed": 3, "global_steps": 4}
    return DataProto.from_dict({"prompts": prompts, "attention_mask": mask}, meta_info={**defaults, **meta})


class RolloutEngineContract:
    """A subclass provides the fixture `bench`: an engine that serves the weights of `tiny_model()` as version 0, with
    `GenerationConfig(seed=11)` where it has one. A test whose feature is in the bench's `lacks` is skipped."""

    def test_it_is_a_rollout_engine(self, bench: Bench) -> None:
        assert isinstance(bench.engine, RolloutEngine)

    def test_answers_come_in_the_order_of_the_requests(self, bench: Bench) -> None:
        requests = requests_of(9, SamplingParams(6))
        responses = complete(bench.engine, requests)
        assert [response.rid for response in responses] == [request.rid for request in requests]
        assert [response.input_tokens for response in responses] == [request.input_ids for request in requests]
        assert complete(bench.engine, []) == []

    def test_equal_requests_give_equal_tokens_and_seeds_matter(self, bench: Bench) -> None:
        prompt = (5, 6, 7)
        params = SamplingParams(24, ignore_eos=True)
        seeds = [0, 1, 2, 0, 1]
        first = complete(bench.engine, [ModelRequest(prompt, replace(params, seed=seed)) for seed in seeds])
        again = complete(bench.engine, [ModelRequest(prompt, replace(params, seed=0))])
        assert first[0].output_tokens == first[3].output_tokens == again[0].output_tokens
        assert first[1].output_tokens == first[4].output_tokens
        assert len(set(tokens_of(first))) == 3

    @pytest.mark.parametrize("params", [SamplingParams(20), SamplingParams(20, temperature=0.7, top_k=12, top_p=0.9)])
    def test_tokens_do_not_depend_on_the_batch(self, bench: Bench, params: SamplingParams) -> None:
        requests = requests_of(8, params)
        together = complete(bench.engine, requests)
        alone = [complete(bench.engine, [request])[0] for request in requests]
        backwards = complete(bench.engine, requests[::-1])[::-1]
        assert tokens_of(together) == tokens_of(alone) == tokens_of(backwards)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_log_probs_are_those_of_the_full_distribution(self, bench: Bench, temperature: float) -> None:
        bench.needs("full log-probabilities")
        params = SamplingParams(30, temperature=temperature, top_k=7, ignore_eos=True)
        check_logprobs(bench, complete(bench.engine, requests_of(6, params)), temperature)

    @pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.8), (10, 0.7)])
    def test_sampled_log_probs_are_renormalised(self, bench: Bench, top_k: int, top_p: float) -> None:
        bench.needs("log-probabilities of the truncated distribution")
        params = SamplingParams(30, temperature=0.9, top_k=top_k, top_p=top_p, ignore_eos=True)
        for response in complete(bench.engine, requests_of(4, params)):
            full = reference_logprobs(bench, response, 0.9)
            probs = full.exp()
            if top_k > 0:
                probs = torch.where(probs >= probs.topk(top_k).values[:, -1:], probs, 0.0)
                probs = probs / probs.sum(-1, keepdim=True)
            ordered = probs.sort(descending=True).values
            kept = (ordered.cumsum(-1) - ordered < top_p).sum(-1, keepdim=True)
            probs = torch.where(probs >= ordered.gather(1, kept - 1), probs, 0.0)
            expected = at_tokens((probs / probs.sum(-1, keepdim=True)).log(), response)
            torch.testing.assert_close(torch.tensor(response.sampled_logprobs).double(), expected, atol=1e-4, rtol=0)

    def test_greedy_takes_the_most_probable_token(self, bench: Bench) -> None:
        for response in complete(bench.engine, requests_of(4, SamplingParams(12, temperature=0.0, ignore_eos=True))):
            full = reference_logprobs(bench, response, 1.0)
            assert full.argmax(-1).tolist() == list(response.output_tokens)
            assert response.sampled_logprobs == (0.0,) * 12

    def test_a_stop_id_ends_the_completion_and_is_its_last_token(self, bench: Bench) -> None:
        params = SamplingParams(200, temperature=1.5, stop_token_ids=(10, 11))
        responses = complete(bench.engine, requests_of(12, params))
        for response in responses:
            assert response.stop_reason is Finish.STOP
            assert response.output_tokens[-1] in (10, 11, EOS)
            assert not {10, 11, EOS} & set(response.output_tokens[:-1])

    def test_eos_can_be_ignored_and_length_ends(self, bench: Bench) -> None:
        params = SamplingParams(300, temperature=2.0, ignore_eos=True)
        responses = complete(bench.engine, requests_of(4, params))
        assert all(r.stop_reason is Finish.LENGTH and len(r.output_tokens) == 300 for r in responses)
        assert any(EOS in r.output_tokens for r in responses)

    def test_no_end_before_min_new_tokens(self, bench: Bench) -> None:
        params = SamplingParams(60, temperature=2.0, stop_token_ids=tuple(range(20, 60)), min_new_tokens=15)
        responses = complete(bench.engine, requests_of(8, params))
        lengths = [len(response.output_tokens) for response in responses]
        assert min(lengths) > 15
        assert {response.stop_reason for response in responses} == {Finish.STOP}
        for response in responses:
            assert not set(response.output_tokens[:15]) & {EOS, *range(20, 60)}

    def test_a_request_that_cannot_be_served_is_named(self, bench: Bench) -> None:
        good = SamplingParams(4)
        wrong = {
            "empty": ModelRequest((), good),
            "outside": ModelRequest((VOCABULARY,), good),
            "negative": ModelRequest((-1,), good),
            "long": ModelRequest((3,) * 5000, good),
            "no tokens": ModelRequest((3,), SamplingParams(0)),
            "top_p": ModelRequest((3,), SamplingParams(4, top_p=0.0)),
            "temperature": ModelRequest((3,), SamplingParams(4, temperature=-1.0)),
        }
        refused: dict[str, str] = {}
        driver = Driver(bench.engine)
        driver.exchange([ModelRequest((3, 4), good, rid="good")])
        new = [replace(request, rid=rid) for rid, request in wrong.items()]
        while len(refused) < len(wrong):
            for delta in bench.engine.exchange(new, wait_s=0.1):
                if delta.rid == "good":
                    driver.partials["good"].add(delta)
                else:
                    assert delta.refused
                    refused[delta.rid] = delta.error
            new = []
        assert all(refused[rid] for rid in wrong)
        assert len(driver.finish()[0].output_tokens) <= 4
        with pytest.raises(ValueError, match="culprit"):
            complete(bench.engine, [ModelRequest((3, 4), good), ModelRequest((), good, rid="culprit")])

    def test_every_token_has_the_version_that_made_it(self, bench: Bench) -> None:
        request = requests_of(1, SamplingParams(5, ignore_eos=True))
        bench.engine.begin_update()
        bench.engine.finish_update(41)
        assert complete(bench.engine, request)[0].output_versions == (41,) * 5
        assert bench.engine.health()["version"] == 41

    def test_tokens_come_home_while_the_engine_decodes_on(self, bench: Bench) -> None:
        requests, long = requests_of(3, SamplingParams(200, ignore_eos=True)), SamplingParams(3000, ignore_eos=True)
        driver = Driver(bench.engine)
        driver.exchange([*requests, ModelRequest((3,), long, rid="long")], wait_s=0.2)
        driver.until(lambda partial: len(partial.tokens) > 20)
        assert driver.partials.pop("long").finish is None
        assert bench.engine.health()["running"]
        late = replace(requests_of(5, SamplingParams(40, ignore_eos=True))[4], rid="late")
        driver.exchange([late], cancel=["long"])
        whole = driver.finish()
        assert [len(response.output_tokens) for response in whole] == [200, 200, 200, 40]
        assert tokens_of(whole) == tokens_of(complete(bench.engine, [*requests, late]))
        assert bench.engine.exchange(wait_s=5.0) == []

    def test_what_comes_home_while_prompts_are_read_in_parts_is_drawn_after_whole_ones(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(base, "REPORT_S", 0.0)
        driver = Driver(bench.engine)
        driver.exchange(requests_of(40, SamplingParams(6, ignore_eos=True), shortest=60), wait_s=0.0)
        check_logprobs(bench, driver.finish(wait_s=0.002))

    @pytest.mark.parametrize("on_update", ["keep", "recompute"])
    def test_updates_while_prompts_are_read_in_parts_leave_whole_ones(self, bench: Bench, on_update: str) -> None:
        bench.needs("loading of tensors")
        bench.needs(f"on_update={on_update}")
        bench.engine.config = bench.engine.config.model_copy(update={"on_update": on_update})  # type: ignore[attr-defined]
        driver = Driver(bench.engine)
        driver.exchange(requests_of(40, SamplingParams(6, ignore_eos=True), shortest=60), wait_s=0.0)
        for version in range(1, 9):
            bench.engine.begin_update()
            bench.engine.finish_update(version)
            driver.exchange(wait_s=0.01)
        check_logprobs(bench, driver.finish())

    def test_an_update_may_follow_another_as_requests_end(self, bench: Bench) -> None:
        bench.needs("loading of tensors")
        known = generate_sequences(bench.engine, prompt_batch(requests_of(2, SamplingParams(4))))
        driver = Driver(bench.engine)
        for turn in range(12):
            short = SamplingParams(1 + turn % 3, ignore_eos=True)
            driver.exchange([replace(one, rid=f"{turn} {one.rid}") for one in requests_of(8, short)], wait_s=0.0)
            time.sleep(0.02 * (turn % 4))
            for version in (1, 2):
                bench.engine.begin_update()
                bench.engine.finish_update(version)
            bench.engine.compute_log_prob(known)
        check_logprobs(bench, driver.finish())

    def test_a_cancelled_request_ends_and_says_no_more(self, bench: Bench) -> None:
        requests = requests_of(3, SamplingParams(3000, ignore_eos=True))
        driver = Driver(bench.engine)
        driver.exchange(requests)
        driver.until(lambda partial: len(partial.tokens) > 5)
        done = {rid: driver.partials.pop(rid) for rid in ("r0", "r1")}
        driver.exchange(cancel=["r0", "r1", "unknown"])
        short = replace(requests[0], gconfig=replace(requests[0].gconfig, max_new_tokens=30))
        driver.exchange([short])
        driver.until(lambda partial: partial.finish is not None or partial.request.rid != "r0")
        assert driver.partials["r0"].tokens[:5] == done["r0"].tokens[:5]
        assert len(driver.partials["r0"].tokens) == 30
        driver.exchange(cancel=["r2"])
        assert wait_until(lambda: not bench.engine.exchange(wait_s=0.1) and not bench.engine.health()["running"])

    def test_answers_survive_an_update_and_every_token_has_its_version(self, bench: Bench) -> None:
        requests = requests_of(3, SamplingParams(3000, ignore_eos=True))
        driver = Driver(bench.engine)
        driver.exchange(requests)
        driver.until(lambda partial: len(partial.tokens) > 10)
        bench.engine.begin_update()
        with pytest.raises(WeightTransferError):
            bench.engine.exchange(wait_s=0.0)
        bench.engine.finish_update(7)
        driver.until(lambda partial: partial.versions.count(7) > 20)
        driver.exchange(cancel=list(driver.partials))
        made = [partial.response() for partial in driver.partials.values()]
        for response in made:
            num_old = response.output_versions.count(0)
            assert response.output_versions == (0,) * num_old + (7,) * (len(response.output_tokens) - num_old)
            assert num_old > 10
        lengths = [len(response.output_tokens) for response in made]
        again = [
            replace(r, gconfig=replace(r.gconfig, max_new_tokens=n)) for r, n in zip(requests, lengths, strict=True)
        ]
        assert tokens_of(made) == tokens_of(complete(bench.engine, again))

    @pytest.mark.parametrize("on_update", ["keep", "recompute"])
    def test_every_token_is_drawn_by_the_weights_of_its_version(self, bench: Bench, on_update: str) -> None:
        """Answers over three versions against shadow models that score each token under its version's weights."""
        bench.needs("loading of tensors")
        bench.needs(f"on_update={on_update}")
        bench.engine.config = bench.engine.config.model_copy(update={"on_update": on_update})  # type: ignore[attr-defined]
        shadows = {version: tiny_model(seed=version) for version in (0, 1, 2)}
        driver = Driver(bench.engine)
        driver.exchange(requests_of(3, SamplingParams(3000, ignore_eos=True)))
        for version in (0, 1, 2):
            if version:
                bench.engine.begin_update()
                bench.engine.load(list(shadows[version].state_dict().items()))
                bench.engine.finish_update(version)
            driver.until(lambda partial, version=version: partial.versions.count(version) > 20)  # type: ignore[misc]
        driver.exchange(cancel=list(driver.partials))
        for response in [partial.response() for partial in driver.partials.values()]:
            given = torch.tensor(response.output_logprobs).double()
            score = shadow_logprobs(shadows, response, response.output_versions, keeps=on_update == "keep")
            torch.testing.assert_close(given, score, atol=2e-4, rtol=0)
            late = (response.output_versions[0], *response.output_versions[:-1])
            assert set(late) == {0, 1, 2}
            wrong = shadow_logprobs(shadows, response, late, keeps=on_update == "keep")
            assert (given - wrong).abs().max() > 0.01

    def test_quarantine_until_the_update_is_whole(self, bench: Bench) -> None:
        bench.needs("loading of tensors")
        request = requests_of(1, SamplingParams(8, temperature=0.0, ignore_eos=True))
        before = tokens_of(complete(bench.engine, request))
        with pytest.raises(WeightTransferError):
            bench.engine.load([])
        bench.engine.begin_update()
        old = {name: tensor for name, tensor in tiny_model().state_dict().items() if name != "lm_head.weight"}
        bench.engine.load([(name, torch.randn_like(tensor)) for name, tensor in list(old.items())[:2]])
        with pytest.raises(WeightTransferError):
            bench.engine.load([("no.such.tensor", torch.zeros(1))])
        name, tensor = next(iter(old.items()))
        with pytest.raises(WeightTransferError, match=name):
            bench.engine.load([(name, tensor[:1])])
        with pytest.raises(WeightTransferError, match="quarantine"):
            complete(bench.engine, request)
        bench.engine.begin_update()
        bench.engine.load(list(old.items()))
        bench.engine.finish_update(1)
        assert tokens_of(complete(bench.engine, request)) == before

    def test_new_weights_are_used(self, bench: Bench) -> None:
        bench.needs("loading of tensors")
        other = tiny_model(seed=1)
        bench.engine.begin_update()
        bench.engine.load(list(other.state_dict().items()))
        bench.engine.finish_update(1)
        request = requests_of(1, SamplingParams(12, temperature=0.0, ignore_eos=True))
        response = complete(bench.engine, request)[0]
        swapped = Bench(bench.engine, lambda ids: other(ids[None]).logits[0].detach())
        expected = at_tokens(reference_logprobs(swapped, response, 1.0), response)
        torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)

    def test_the_layout_speaks_of_the_live_tensors(self, bench: Bench) -> None:
        bench.needs("tensors")
        layout, tensors = bench.engine.weight_layout(), bench.engine.local_tensors()
        names = {shard.box.tensor for shard in layout.shards}
        assert names == set(layout.full_shapes) == set(layout.dtypes)
        assert all(held in names and alias not in names for alias, held in layout.aliases.items())
        for shard in layout.shards:
            start, shape = shard.local_start, shard.box.shape
            assert all(a + n <= size for a, n, size in zip(start, shape, tensors[shard.local].shape, strict=True))
        again = bench.engine.local_tensors()
        assert all(again[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())

    def test_sleep_and_wake_change_nothing(self, bench: Bench) -> None:
        requests = requests_of(3, SamplingParams(6))
        before = tokens_of(complete(bench.engine, requests))
        bench.engine.sleep(["weights", "kv_cache"])
        bench.engine.wake(["weights"])
        bench.engine.wake(["kv_cache"])
        assert tokens_of(complete(bench.engine, requests)) == before
        with pytest.raises(ValueError, match="tags"):
            bench.engine.sleep(["everything"])

    def test_a_batch_comes_back_in_the_agreed_layout(self, bench: Bench) -> None:
        requests = requests_of(7, SamplingParams(24))
        out = generate_sequences(bench.engine, prompt_batch(requests, temperature=1.3, stop_token_ids=[30, 31]))
        rows, width = out.batch, out.batch["prompts"].shape[1]
        mask, lengths = rows["response_mask"], rows["response_mask"].sum(1)
        assert rows["responses"].shape == mask.shape == (7, 24)
        assert torch.equal(rows["input_ids"], torch.cat([rows["prompts"], rows["responses"]], 1))
        assert torch.equal(rows["attention_mask"][:, width:], mask)
        assert torch.equal(mask, (torch.arange(24) < lengths[:, None]).long())
        for name, empty in [
            ("responses", 0),
            ("rollout_log_probs", 0),
            ("rollout_sampled_log_probs", 0),
            ("weight_versions", -1),
        ]:
            assert (rows[name][mask == 0] == empty).all()
        assert (rows["weight_versions"][mask == 1] == 0).all()
        first = rows["attention_mask"].argmax(1)
        for row in range(7):
            expected = torch.arange(width + 24 - first[row])[: len(requests[row].input_ids) + lengths[row]]
            assert torch.equal(rows["position_ids"][row, first[row] :][: len(expected)], expected)
        ends = {"stop": {30, 31, EOS}}
        for row, reason in enumerate(out.non_tensor_batch["finish_reason"]):
            assert (int(rows["responses"][row, lengths[row] - 1]) in ends["stop"]) == (reason == "stop")

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_engine_scores_are_the_sampled_log_probs(self, bench: Bench, temperature: float) -> None:
        if temperature != 1.0:
            bench.needs("scores at a temperature")
        out = generate_sequences(
            bench.engine, prompt_batch(requests_of(7, SamplingParams(24)), temperature=temperature)
        )
        scores = bench.engine.compute_log_prob(out, temperature=temperature)
        torch.testing.assert_close(scores, out.batch["rollout_log_probs"], atol=1e-4, rtol=0)

    def test_rows_have_their_own_seed_whatever_the_split(self, bench: Bench) -> None:
        same = [requests_of(1, SamplingParams(24))[0]] * 6
        whole = prompt_batch(same, ignore_eos=True)
        out = generate_sequences(bench.engine, whole).batch["responses"]
        assert len({tuple(row) for row in out.tolist()}) == 6
        next_step = generate_sequences(bench.engine, prompt_batch(same, ignore_eos=True, global_steps=5)).batch[
            "responses"
        ]
        assert not (next_step == out).all(1).any()
        empty = from_responses(whole, [ModelResponse("", (), (), (), (), (), Finish.ABORT)] * 6)
        assert empty.batch["response_mask"].sum() == 0
