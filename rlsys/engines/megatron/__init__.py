"""Training with Megatron-Core."""
