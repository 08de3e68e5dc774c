"""What frozen features are worth: kNN, a linear classifier, distributions of similarities and variances."""
