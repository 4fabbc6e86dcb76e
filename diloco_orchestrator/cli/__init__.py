"""The `diloco` command line: one file per group of commands, and their output."""
