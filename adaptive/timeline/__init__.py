"""The record of what happened, where it goes, and what it comes to."""
