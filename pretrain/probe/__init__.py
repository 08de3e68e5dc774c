"""Evaluation of frozen features: kNN, linear classifier, t-SNE map, distributions of similarity and variance."""
