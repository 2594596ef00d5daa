"""Training engines behind the TrainEngine protocol."""
