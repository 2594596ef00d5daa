"""Rollout replicas seen from the driver: routing, retries, health."""
