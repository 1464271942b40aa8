"""What is kept of each parameter, and what is done in the optimizer's place."""
