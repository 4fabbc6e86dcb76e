"""The code that replicas on other machines need: packed by the launcher, fetched and started there."""
