"""Imported last by the server that ranks with GPUs are forked from: the ranks see the GPUs that its imports did not."""

import os

import torch.utils._triton

VISIBLE, SHOWN = "CUDA_VISIBLE_DEVICES", "SHOWN_GPUS"


def show_gpus() -> None:
    """Make the GPUs visible again that were hidden; they were all visible where SHOWN_GPUS is empty."""
    os.environ.pop(VISIBLE, None)
    if shown := os.environ.pop(SHOWN, ""):
        os.environ[VISIBLE] = shown
    for answer in vars(torch.utils._triton).values():  # whether there is Triton was asked, and kept, without GPUs
        if hasattr(answer, "cache_clear"):
            answer.cache_clear()


if SHOWN in os.environ:
    show_gpus()
