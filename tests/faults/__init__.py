"""Faults, made on purpose, in real processes: what becomes of each (make faults)."""
