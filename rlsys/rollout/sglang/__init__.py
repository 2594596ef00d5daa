"""SGLang behind the RolloutEngine protocol; the modules here are the only ones that import sglang."""
