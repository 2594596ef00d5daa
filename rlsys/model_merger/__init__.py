"""Checkpoints of training <-> Hugging Face model directories, tensor by tensor.

`python -m rlsys.model_merger` is its command.
"""
