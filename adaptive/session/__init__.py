"""A compressor at work on one model, from attach to close."""
