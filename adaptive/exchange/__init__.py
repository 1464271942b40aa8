"""How the payloads of all ranks become their mean."""
