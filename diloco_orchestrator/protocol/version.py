"""The version of this package, which records and reports name. pyproject.toml repeats it."""

VERSION = "0.3.0"
