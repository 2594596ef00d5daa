"""Advantage estimators, policy losses, KL and corrections: pure tensor functions."""
