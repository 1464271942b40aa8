"""`python -m runs bench`: speed and memory as ratios against a peer in the same run."""
