"""Rollout with transformers."""
