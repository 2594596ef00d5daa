"""Model construction and log-probabilities."""
