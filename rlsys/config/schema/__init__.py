"""The typed, frozen configuration: one module per section."""
