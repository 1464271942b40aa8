"""Suites, data sets and models of papers. A run of a user's own needs none of them."""
