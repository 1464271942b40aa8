"""The user's settings: checked arguments, and the bytes that a step sends with them."""
