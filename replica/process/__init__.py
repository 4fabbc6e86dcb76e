"""The process around the training function: one attempt from claim to exit record, or one round's training repeated."""
