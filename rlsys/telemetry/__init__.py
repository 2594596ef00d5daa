"""Logging, metrics, trackers, progress, traces and rollout dumps."""
