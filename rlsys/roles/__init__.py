"""PPOActor, PPOCritic, LMEngine, RWEngine: an engine and a loss each."""
