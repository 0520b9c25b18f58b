"""Model files: which exist, what they hold, and how their tensors reach the models."""
