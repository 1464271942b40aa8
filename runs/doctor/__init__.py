"""`python -m runs doctor`: what compression would bring a training script of one's own."""
