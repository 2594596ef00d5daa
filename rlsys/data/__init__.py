"""Prompt rows, cursors and chat templates."""
