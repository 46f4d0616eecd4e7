"""The training loop and everything it drives."""
