"""The workload of `diloco demo`: a small language model over text that is on every machine."""
