"""The models in torch, with the parameter names of the official checkpoints."""
