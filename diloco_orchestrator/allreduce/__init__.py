"""Averages of tensors through a bucket: payloads are written once, verified when read, and averaged in fixed order."""
