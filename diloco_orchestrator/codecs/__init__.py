"""Encodings of pseudo-gradients as bytes. A codec is one file here, and one row of `table.CODECS`."""
