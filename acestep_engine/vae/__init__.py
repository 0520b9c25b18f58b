"""Latents and waveforms, in tiles."""
