"""`AdaptiveCompressor`, its session on one model, from attach to close, and its checkpoints."""
