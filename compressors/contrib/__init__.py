"""Optional compressors, imported at their first use (`compressors/registry.py`)."""
