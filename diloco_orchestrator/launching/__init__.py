"""Starts runs: `launch`, `attach`, plans of launches with their prices, and a process that tries a place out."""
