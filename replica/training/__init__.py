"""The training loop between two rounds: inner steps, synchronisation, resume, and what a contribution reports."""
