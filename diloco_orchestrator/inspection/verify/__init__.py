"""Derives a run again from its bucket and names the first object that disagrees."""
