"""`python -m runs tune`: a search for the settings that train best, by Optuna."""
