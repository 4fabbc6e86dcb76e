"""The code archive of a run: packed by the launcher, fetched and unpacked by replicas on other machines."""
