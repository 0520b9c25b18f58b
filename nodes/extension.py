"""The list of nodes, and how ComfyUI gets it. It knows no node from the inside."""

from __future__ import annotations

import importlib
import logging

from comfy_api.latest import ComfyExtension, io

logger = logging.getLogger(__name__)

NODES = {
    "load": ("LoadACEStep",),
    "lora": ("ApplyLoRA",),
    "plan": ("CoTPlanner",),
    "words": ("SongWriter", "LyricFormatter"),
    "listen": ("Understand", "ScoreCodes"),
    "edit": ("PlanEdit", "CodesText"),
    "codes": ("AudioCodeSampler",),
    "material": ("CodesEdit", "CodesFromAudio"),
    "tasks": ("CoverTask", "RepaintTask", "ExtractTask", "LegoTask", "CompleteTask"),
    "render": ("DiTSampler",),
    "audio": ("VAEDecodeTiled", "VAEEncodeTiled"),
    "splice": ("SpliceAudio",),
    "native": ("ToConditioning", "FromConditioning"),
    "mask": ("LatentNoiseMask",),
}


def load_nodes() -> tuple[list[type[io.ComfyNode]], list[str]]:
    """The node classes, and a line for each module that this ComfyUI cannot load.

    Modules are imported apart, so that one failure does not hide the other nodes.
    """
    classes: list[type[io.ComfyNode]] = []
    failures: list[str] = []
    for name, class_names in NODES.items():
        try:
            module = importlib.import_module(f".{name}", __package__)
            classes += [getattr(module, class_name) for class_name in class_names]
        except (ImportError, AttributeError, TypeError) as error:
            failures.append(f"{', '.join(class_names)}: {type(error).__name__}: {error}")
    return classes, failures


class AceStepExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Every node that loads; the others are named in one log line with the reason."""
        classes, failures = load_nodes()
        if failures:
            logger.error(
                "ACE-Step: %d node group(s) are missing. %s. Update ComfyUI to 0.20.1 or newer and "
                "install requirements.txt of this pack.",
                len(failures),
                "; ".join(failures),
            )
        return classes
