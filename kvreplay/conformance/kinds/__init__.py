"""The kinds of vectors, one module each."""
