"""One step: the way of a gradient, and the way of a decision."""
