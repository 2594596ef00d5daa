"""Weight layouts, transfer executors and sharding managers."""
