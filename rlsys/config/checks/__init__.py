"""Cross-section checks of a configuration whose values are each valid."""
