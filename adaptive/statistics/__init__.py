"""The statistics of a step, on which all ranks agree."""
