"""PPOActor, PPOCritic, LMEngine and RWEngine: each an engine with a loss."""
