"""The model that engines shard: a transformers backbone with its head, from unpadded rows to numbers per token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate

from rlsys.models.attention import Packing, sum_over
from rlsys.models.logprobs import VocabularyPart, token_stats
from rlsys.models.packing import TokenRows, left_aligned, padded_to, to_device
from rlsys.models.vision import embed
from rlsys.utils.errors import ConfigError

LM_OUTPUTS = ("log_probs", "entropy", "sum_pi_squared", "topk_log_probs", "topk_ids")
SCALAR_OUTPUTS = ("values", "scores")


class TokenModel(nn.Module):
    """`model` is a causal LM, or a backbone with a scalar `score` head; it is called through this module only.

    `packed` lays the rows end to end, otherwise they are padded on the right to the longest. `group` spreads the tokens
    of a pack over its ranks (Ulysses); every rank gets all results. An output weight that is a DTensor when it is used
    is split over the vocabulary.
    """

    chunk_elements: int | None = None
    """Logits that exist at once; None: as many as `rlsys.models.logprobs` takes on the device."""

    def __init__(self, model: Any, *, packed: bool = True, group: ProcessGroup | None = None) -> None:
        super().__init__()
        if group is not None and not packed:
            raise ConfigError("sequence parallelism needs packed rows: set use_remove_padding=true")
        self.model = model
        self.packed, self.group = packed, group

    @property
    def is_lm(self) -> bool:
        return not hasattr(self.model, "score")

    def forward(
        self, rows: TokenRows, outputs: Sequence[str], temperature: float = 1.0, topk: int = 0
    ) -> dict[str, Tensor]:
        """Numbers of the M response tokens (M,) or (M, topk), float32. `values` are of the state before each token,
        `scores` of the token itself; the head decides which outputs exist, others raise ValueError."""
        hidden, (begin, end) = self._hidden(rows)

        def own(places: Tensor) -> tuple[Tensor, Tensor]:
            numbers = ((places >= begin) & (places < end)).nonzero()[:, 0]
            return numbers, places[numbers] - begin

        head = self.model.get_output_embeddings().weight if self.is_lm else lambda x: self.model.score(x).sum(dim=-1)
        options: dict[str, object] = {"temperature": temperature, "topk": topk, "chunk_elements": self.chunk_elements}
        options["softcap"] = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        if isinstance(head, DTensor):
            mesh, head = head.device_mesh, head.to_local()
            options["part"] = VocabularyPart(mesh.get_local_rank() * len(head), mesh.get_group())
            hidden = DTensor.from_local(hidden, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return token_numbers(hidden, rows, outputs, head, own, self.group, **options)

    def _hidden(self, rows: TokenRows) -> tuple[Tensor, tuple[int, int]]:
        """Last hidden states (n, H) of this rank's tokens and their range among the N of the pack."""
        images = rows.images
        backbone = getattr(self.model, self.model.base_model_prefix) if images is None else self.model.get_decoder()
        if not self.packed:
            ids, positions, mask, places = left_aligned(rows)
            given: dict[str, Any] = {"input_ids": ids}
            if images is not None:
                whole = embed(self.model, ids.flatten(), replace(images, places=places[images.places]))
                given = whole.arguments((ids.shape[0], ids.shape[1]))
            states = backbone(**given, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
            return states.flatten(0, 1)[places], (0, rows.num_tokens)
        size, rank = (dist.get_world_size(self.group), dist.get_rank(self.group)) if self.group else (1, 0)
        whole = padded_to(rows, -(-rows.num_tokens // size) * size)
        share = whole.num_tokens // size
        mine = slice(rank * share, (rank + 1) * share)
        packing = Packing(whole.lengths, whole.token_ids.device, self.group)
        given = {"input_ids": whole.token_ids[None, mine]}
        if images is not None:
            given = embed(self.model, whole.token_ids, images).arguments((1, whole.num_tokens), mine)
        positions = whole.position_ids[..., None, mine]
        states = backbone(**given, position_ids=positions, use_cache=False, packing=packing).last_hidden_state
        return states[0], (mine.start, mine.stop)


def token_numbers(
    states: Tensor,
    rows: TokenRows,
    outputs: Sequence[str],
    head: Tensor | Callable[[Tensor], Tensor],
    own: Callable[[Tensor], tuple[Tensor, Tensor]],
    group: ProcessGroup | None,
    **options: Any,
) -> dict[str, Tensor]:
    """Numbers (M,) or (M, topk) of the response tokens from the states (n, H) of the tokens that this rank holds, equal
    on all ranks of `group`; ValueError for outputs that the head does not give.

    `head` makes a scalar of each state, or is the weight of the vocabulary, which `token_stats` takes with `options`.
    `own` gives which of some places in the pack this rank holds, and where, all on the host. All ranks continue with
    the same loss, so each takes the gradient of its own.
    """
    known = LM_OUTPUTS if isinstance(head, Tensor) else SCALAR_OUTPUTS
    if unknown := [name for name in outputs if name not in known]:
        raise ValueError(f"this model gives {', '.join(known)}, not {', '.join(unknown)}")

    def at(name: str, compute: Callable[[Tensor, object], dict[str, Tensor]]) -> dict[str, Tensor]:
        if group is None:
            return compute(states[getattr(rows, name)], slice(None))
        numbers, here = (to_device(x, states.device) for x in own(getattr(rows.on_host or rows, name)))
        made = compute(states[here], numbers)
        spread = {name: x.new_zeros(len(rows.at), *x.shape[1:]).index_copy(0, numbers, x) for name, x in made.items()}
        return {name: sum_over(values, group) for name, values in spread.items()}

    if not isinstance(head, Tensor):
        places = {"values": "before", "scores": "at"}
        return {name: at(places[name], lambda x, _: {"it": head(x)})["it"] for name in outputs}

    def stats(here: Tensor, numbers: Any) -> dict[str, Tensor]:
        ids = None if rows.topk_ids is None else rows.topk_ids[numbers]
        made = token_stats(here, head, rows.targets[numbers], outputs=outputs, topk_ids=ids, **options)
        return {name: made[name] for name in outputs}

    return at("before", stats)
