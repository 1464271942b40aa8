"""The memories (residuals, velocities, moments), and the work that they do for optimizers."""
