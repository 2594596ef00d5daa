"""A single-process float64 engine with a tiny causal model: what the roles are tested on."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlsys.interfaces import LossFn, Output
from rlsys.protocol import DataProto
from rlsys.types import StepReport

VOCABULARY = 13


class TinyModel(nn.Module):
    """Mixes the tokens so far by their position from the start, so that padding is invisible."""

    def __init__(self, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.5 * torch.randn(*shape, generator=draw, dtype=torch.float64))

        self.embedding, self.mix = weight(VOCABULARY, width), weight(width, width)
        self.head, self.value = weight(VOCABULARY, width), weight(width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        scale = 1 + 0.1 * position_ids.unsqueeze(-1)
        embedded = self.embedding[input_ids] * attention_mask.unsqueeze(-1) * scale
        count = attention_mask.cumsum(1).clamp(min=1).unsqueeze(-1)
        return torch.tanh((embedded.cumsum(1) / count) @ self.mix + embedded)


def trimmed(rows: DataProto) -> DataProto:
    """Without the columns in which no response of these rows has a token, as engines may pass micro-batches."""
    held = rows.batch
    assert held is not None
    width = held["responses"].shape[1]
    cut = width - int(held["attention_mask"][:, -width:].sum(1).max())
    wide = (width, held["input_ids"].shape[1])
    cut_down = {k: v[:, : v.shape[1] - cut] if v.dim() == 2 and v.shape[1] in wide else v for k, v in held.items()}
    return DataProto.from_dict(tensors=cut_down)


class TinyEngine:
    """Implements the part of TrainEngine that roles use; `micro_rows` is how it splits the rows."""

    dp_rank, dp_size, is_collect = 0, 1, True

    def __init__(self, *, micro_rows: int = 3, lr: float = 0.1, seed: int = 0) -> None:
        self.model = TinyModel(seed)
        self.micro_rows, self.lr = micro_rows, lr
        self.count = 0.0
        self.steps: list[StepReport] = []
        self.seen: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []

    def _outputs(self, rows: DataProto, outputs: Sequence[Output], temperature: float) -> dict[str, Tensor]:
        held = rows.batch
        assert held is not None
        hidden = self.model(held["input_ids"], held["attention_mask"], held["position_ids"])
        width = held["responses"].shape[1]
        before = hidden[:, -width - 1 : -1]
        log_p = (before @ self.model.head.T / temperature).log_softmax(-1)
        mask = held["response_mask"]
        computed = {
            "log_probs": log_p.gather(2, held["responses"].unsqueeze(2)).squeeze(2),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "sum_pi_squared": log_p.exp().square().sum(-1),
            "values": before @ self.model.value,
            "scores": hidden[:, -width:] @ self.model.value,
        }
        return {name: computed[name] * mask for name in outputs}

    def forward(
        self, batch: DataProto, outputs: Sequence[Output], *, temperature: float = 1.0, topk: int = 0
    ) -> dict[str, Tensor]:
        with torch.no_grad():
            return self._outputs(batch, outputs, temperature)

    def forward_backward(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        *,
        outputs: Sequence[Output] = ("log_probs",),
        temperature: float = 1.0,
    ) -> dict[str, float]:
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for rows in map(trimmed, batch.split(self.micro_rows)):
            assert rows.batch is not None
            loss = loss_fn(self._outputs(rows, outputs, temperature), rows.batch)
            loss.total.backward()
            self.count += float(loss.count)
            for name, (total, count) in {"loss": (loss.total.item(), loss.count), **loss.metrics}.items():
                sums[name][0] += float(total)
                sums[name][1] += float(count)
        if batch.batch is not None and "index" in batch.batch.keys():  # noqa: SIM118
            self.seen.append(batch.batch["index"])
        return {name: total / count if count else 0.0 for name, (total, count) in sums.items()}

    def optim_step(self) -> StepReport:
        parameters = dict(self.model.named_parameters())
        gradients = {name: p.grad / self.count for name, p in parameters.items() if p.grad is not None}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        applied = bool(torch.isfinite(torch.tensor(norm)))
        with torch.no_grad():
            for name, gradient in gradients.items():
                if applied:
                    parameters[name] -= self.lr * gradient
                parameters[name].grad = None
        self.count = 0.0
        self.gradients.append(gradients)
        self.steps.append(StepReport(grad_norm=norm, lr=self.lr, applied=applied))
        return self.steps[-1]


def make_batch(rows: int = 8, prompt: int = 3, response: int = 5, seed: int = 0) -> DataProto:
    """Random rows in the layout of all batches: prompts padded on the left, responses on the right."""
    draw = torch.Generator().manual_seed(seed)
    columns = torch.arange(prompt + response)
    left = torch.randint(0, prompt, (rows, 1), generator=draw)
    length = torch.randint(1, response + 1, (rows, 1), generator=draw)
    attention = ((columns >= left) & (columns < prompt + length)).long()
    ids = torch.randint(1, VOCABULARY, attention.shape, generator=draw) * attention
    position = (attention.cumsum(1) - 1).clamp(min=0) * attention
    mask = attention[:, prompt:].clone()
    normal = torch.randn(rows, response, generator=draw, dtype=torch.float64)
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": position,
            "response_mask": mask,
            "advantages": normal * mask,
            "returns": normal * mask,
            "index": torch.arange(rows),
        },
        meta_info={"temperature": 1.0, "global_steps": 4},
    )
