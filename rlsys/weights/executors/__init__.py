"""One module for each way of moving weights: what its ranks are sent, their two sides, and the controller's side."""
