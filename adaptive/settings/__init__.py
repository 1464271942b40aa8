"""What a script has chosen."""
