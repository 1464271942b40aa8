"""Runnable jobs on top of the library: python -m runs --help."""
