"""The process around the training function: one attempt from claim to exit record, and the re-run of a range."""
