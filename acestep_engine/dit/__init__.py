"""The diffusion half: plan and codes to latents."""
