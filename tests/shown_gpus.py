"""Imported last by the server that ranks with GPUs are forked from: the ranks see the GPUs that its imports did not."""

import os

VISIBLE, SHOWN = "CUDA_VISIBLE_DEVICES", "SHOWN_GPUS"


def show_gpus() -> None:
    """Make the GPUs visible again that were hidden; they were all visible where SHOWN_GPUS is empty."""
    os.environ.pop(VISIBLE, None)
    if shown := os.environ.pop(SHOWN, ""):
        os.environ[VISIBLE] = shown


if SHOWN in os.environ:
    show_gpus()
