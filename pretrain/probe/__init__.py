"""Evaluation of frozen features: kNN, linear classifier and t-SNE map."""
