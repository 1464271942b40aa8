"""The session of a compressor on one model, from attach to close, and its checkpoints."""
