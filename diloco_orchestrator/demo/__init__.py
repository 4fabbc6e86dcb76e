"""The workload of `diloco demo`: a small language model over text that every machine has."""
