"""Keys of signed runs, and a store that signs what it writes and shows only what the run's keys have signed."""
