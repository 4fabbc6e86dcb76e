"""Starts runs: `launch`, `attach`, plans of launches with their prices, and a trial process on a provider's machine."""
