"""Untrusted code in a sandbox."""
