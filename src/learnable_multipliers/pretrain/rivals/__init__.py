"""Optimizers of other papers, to compare multipliers with: a page for each."""
