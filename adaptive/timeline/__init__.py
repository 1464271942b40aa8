"""The timeline of a run: its records, the sinks that write them, and the summary."""
