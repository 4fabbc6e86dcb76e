"""The code of a run on its way to other machines: packed by the launcher, fetched and started by a replica."""
