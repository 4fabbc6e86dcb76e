"""Classes of other libraries, served by our rounds."""
