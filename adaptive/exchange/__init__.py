"""How the buckets of all ranks, compressed to payloads, become their mean."""
