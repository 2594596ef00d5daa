"""Gated delta layers run here without a GPU, where Megatron has them."""

from tests.fla_stand_in import install

install()
