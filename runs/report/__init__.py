"""`python -m runs report`: runs that are done, as one page to read."""
