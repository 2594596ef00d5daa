"""The tokenizer of the start model, a new one for each caller."""

from transformers import PreTrainedTokenizerFast

from rlsys.data.start_assets import START_MODEL


def build_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(START_MODEL)
