"""The held-out set before a run: what an item is, which items are held out, and the manifest that says so.

Pure Python but for the formats of files. The guard that judges by the set is in `guard`.
"""
