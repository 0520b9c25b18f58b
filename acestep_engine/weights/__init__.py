"""Files into models."""
