"""The global model: its bits (`base`), its files in the bucket (`layout`), its reconstruction (`rebuild`)."""
