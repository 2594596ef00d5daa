"""Rows to batches: prompts padded on the left, responses on the right.

B rows, P prompt and R response tokens. Token tensors are int64; `position_ids` count from 0 at the first real token and
are 0 at pads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsys.data.chat import Tokenizer, answer_ends, as_messages, encode_conversation
from rlsys.data.rows import PromptRow
from rlsys.data.supervised import TokenizedText
from rlsys.protocol import IMAGES, DataProto, ImageInputs, object_array
from rlsys.protocol.rows import compute_response_mask, pad_rows, position_ids, row_tensors
from rlsys.types import Finish


def uid(epoch: int, index: int) -> str:
    """The name that all answers to one prompt share; a resumed run gives the same."""
    return f"{epoch}-{index}"


def collate_prompts(
    rows: Sequence[PromptRow], *, pad_token_id: int, epoch: int = 0, prompt_length: int | None = None
) -> DataProto:
    """Prompts to generate from: tensors prompts, attention_mask, position_ids (B, P).

    P is `prompt_length`, or that of the longest prompt. Columns: uid, index, data_source, ability, reward_model,
    extra_info, tools_kwargs, interaction_kwargs, raw_prompt, and all other columns of the rows; with a vision-language
    model also multi_modal_inputs.
    """
    prompts, mask = padded_prompts([row.token_ids for row in rows], pad_token_id, prompt_length)
    columns: dict[str, list[object]] = {
        name: [row.fields.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row.fields)
    }
    columns |= {
        "uid": [uid(epoch, row.index) for row in rows],
        "index": [row.extra_info.get("index", row.index) for row in rows],
        "data_source": [row.data_source for row in rows],
        "ability": [row.ability for row in rows],
        "reward_model": [dict(row.reward_model) for row in rows],
        "extra_info": [dict(row.extra_info) for row in rows],
        "tools_kwargs": [row.extra_info.get("tools_kwargs") or {} for row in rows],
        "interaction_kwargs": [row.extra_info.get("interaction_kwargs") or {} for row in rows],
        "raw_prompt": [[dict(message) for message in as_messages(row.raw_prompt)] for row in rows],
    }
    if all(row.load_images is not None for row in rows):
        shared: dict[ImageInputs, ImageInputs] = {}
        loaded = [row.load_images() for row in rows if row.load_images is not None]
        columns[IMAGES] = [tuple(shared.setdefault(one, one) for one in images) for images in loaded]
    tensors = {"prompts": prompts, "attention_mask": mask, "position_ids": position_ids(mask)}
    return DataProto.from_dict(tensors, {name: object_array(values) for name, values in columns.items()})


def collate_answers(batch: DataProto, *, tokenizer: Tokenizer, own: Tokenizer) -> DataProto:
    """The answers of a batch, whose ids are `tokenizer`'s, as conversations in `own` tokens and chat template.

    One that was cut off at its length does not get the end that the template writes.
    """
    held, columns, rows = batch.tensors, batch.non_tensor_batch, []
    answers = zip(columns["raw_prompt"], held["responses"], columns["finish_reason"], strict=True)
    for (messages, ids, reason), kept in zip(answers, compute_response_mask(batch).bool(), strict=True):
        answer = {"role": "assistant", "content": tokenizer.decode(ids[kept].tolist(), skip_special_tokens=True)}
        prompt, response, mask = encode_conversation(own, [*messages, answer], num_prompt=len(messages))
        end = len(response) - (reason == Finish.LENGTH and response[-1] in answer_ends(own))
        rows.append([TokenizedText(prompt, response[:end], mask[:end])])
    return collate_texts(rows, pad_token_id=own.pad_token_id)


def collate_texts(rows: Sequence[Sequence[TokenizedText]], *, pad_token_id: int) -> DataProto:
    """Texts to learn from, in the layout of generated rows; the texts of a row follow each other.

    Columns: prompts (B, P), responses and response_mask (B, R), input_ids, attention_mask and position_ids; P and R are
    those of the longest texts. With labels also is_desirable (B,).
    """
    texts = [text for row in rows for text in row]
    prompts, prompt_mask = padded_prompts([text.prompt_ids for text in texts], pad_token_id)
    responses = pad_rows([text.response_ids for text in texts], value=pad_token_id)
    tensors = row_tensors(prompts, prompt_mask, responses, pad_rows([[1] * len(text.mask) for text in texts], value=0))
    tensors["response_mask"] = pad_rows([text.mask for text in texts], value=0)
    if any(text.is_desirable is not None for text in texts):
        tensors["is_desirable"] = torch.tensor([bool(text.is_desirable) for text in texts])
    return DataProto.from_dict(tensors)


def padded_prompts(prompts: Sequence[Sequence[int]], value: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Prompts (B, P) padded on the left, and their mask."""
    mask = pad_rows([[1] * len(prompt) for prompt in prompts], value=0, left=True, length=length)
    return pad_rows(prompts, value=value, left=True, length=length), mask
