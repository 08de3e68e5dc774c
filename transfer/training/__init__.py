"""What fine-tuning needs around its steps: images, checkpoints, scores and batch-norm statistics."""
