"""The version of this package, which records and reports name. Also in pyproject.toml."""

VERSION = "0.3.0"
