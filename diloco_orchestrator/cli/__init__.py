"""The `diloco` command line: one file per group of commands, and what they print."""
