"""Layer algebra in MLX, the twin of `models_torch`: same files, classes and parameter names."""
