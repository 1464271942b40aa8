"""`python -m runs replay`: what a policy would have chosen in a recorded run."""
