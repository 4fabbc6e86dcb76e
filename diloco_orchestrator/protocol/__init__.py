"""The objects of a run's folder and the rules of a round, as pure functions; only the codecs handle tensors."""
