"""One module per transport of weights."""
