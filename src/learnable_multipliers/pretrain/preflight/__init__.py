"""Checks before a run: machine, memory, data, a few steps, resuming."""
