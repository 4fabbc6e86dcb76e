"""The main job with an embedded default: a small language model on text that every machine has."""
