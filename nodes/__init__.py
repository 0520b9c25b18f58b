"""ComfyUI nodes: each reads its widgets, makes one engine call and wraps the result."""
