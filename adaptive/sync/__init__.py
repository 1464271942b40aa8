"""How the ranks keep their models together."""
