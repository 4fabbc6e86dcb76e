"""The global model (base) and the outer optimizer's step on it, with the same bits on every machine."""
