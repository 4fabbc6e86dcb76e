"""Averages through a bucket: payloads written once, verified on every read, averaged in one order."""
