"""Other libraries' loops over our rounds."""
