"""Megatron-Core models: how families of Hugging Face models lie in them, and how they are built."""
