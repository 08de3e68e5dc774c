"""Evaluation of frozen features: kNN, a linear classifier, a t-SNE map, distributions of similarities and variances."""
