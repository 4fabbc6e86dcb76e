"""What runs beside the training loop in each replica."""
