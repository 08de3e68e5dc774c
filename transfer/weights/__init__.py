"""Weights files: where they are, how they are converted and verified, and how a detector loads them."""
