"""Data for pretraining: text to token shards, and batches in an order that is a pure function."""
