"""The numbers of a step, on which all ranks agree."""
