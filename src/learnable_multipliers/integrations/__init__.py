"""Adapters for training frameworks, and readers of their checkpoints for `lrm diagnose`."""
