"""Pretraining: models, data, the recipe of the paper and the loop that runs it."""
