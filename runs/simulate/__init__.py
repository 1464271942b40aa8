"""`python -m runs simulate`: n workers in one process, under a modelled network."""
