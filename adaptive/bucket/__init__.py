"""One bucket in one step: its units, their payloads, and the memory's part of it."""
