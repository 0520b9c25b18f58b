"""The models in torch: module trees named as the official checkpoints, without files or loops."""
