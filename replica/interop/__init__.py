"""Adapters of our rounds to the interfaces of other libraries."""
