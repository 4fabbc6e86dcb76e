"""Splits data into training and held-out items before a run: item identity, the rule of the split, and its manifest.

Pure Python except for file formats. `guard` judges runs by the held-out set.
"""
