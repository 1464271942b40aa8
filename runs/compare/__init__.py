"""`python -m runs compare`: several ways to compress, trained in turn on the same task."""
