"""Rollout engines behind the RolloutEngine protocol, and the fleet over them."""
