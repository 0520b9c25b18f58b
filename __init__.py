"""ACE-Step 1.5 for ComfyUI: wired nodes over one lazily built engine.

Nothing is imported here: ComfyUI calls the entry point, and test runners may collect this folder
under any name, with or without ComfyUI.
"""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./nodes/web"


async def comfy_entrypoint() -> Any:
    """What ComfyUI asks for the nodes."""
    from .nodes.extension import AceStepExtension

    return AceStepExtension()
