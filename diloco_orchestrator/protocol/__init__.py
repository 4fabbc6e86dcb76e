"""What is in the bucket, and the rules of a round: no input or output, no tensors but in the codecs."""
