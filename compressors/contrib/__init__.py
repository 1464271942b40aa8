"""Compressors that only some need: imported when they are named (`compressors/registry.py`)."""
