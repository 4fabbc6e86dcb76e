"""How code reaches replicas on other machines: one archive in the bucket, one small program that unpacks it there."""
