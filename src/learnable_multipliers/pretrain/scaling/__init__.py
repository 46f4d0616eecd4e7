"""Forecast the cost of a train step on many ranks: bytes, messages and seconds."""
