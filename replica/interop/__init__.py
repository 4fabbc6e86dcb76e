"""Adapters of DiLoCo rounds to other libraries: transformers, TRL, torchft."""
