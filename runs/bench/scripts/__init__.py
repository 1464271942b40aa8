"""Training scripts of their own, which benches start as a user would."""
