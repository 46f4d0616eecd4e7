"""Checkpoints: crash-safe, verified, sharded."""
