"""`python -m runs netlab`: real slow links on one machine, a network namespace for each worker."""
