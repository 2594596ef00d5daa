"""Sampling of tokens, shared by all rollout engines."""
