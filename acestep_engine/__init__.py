"""An inference engine for ACE-Step 1.5: a song from words, one method per stage.

from acestep_engine import Request, discover, get_engine

engine, model = get_engine(), discover("models/acestep")
plan = engine.plan(model, Request(caption="calm piano", duration=30))
codes = engine.compose(model, plan)
audio = engine.decode(model, engine.render(model, plan, codes))
"""

from .engine import Engine, get_engine
from .errors import AceStepError
from .types import (
    Audio,
    Codes,
    ComposeOptions,
    DiTSampling,
    Latents,
    LMSampling,
    Metadata,
    ModelSpec,
    Plan,
    PlanOptions,
    Request,
)
from .weights.layouts import discover

__all__ = [
    "AceStepError",
    "Audio",
    "Codes",
    "ComposeOptions",
    "DiTSampling",
    "Engine",
    "LMSampling",
    "Latents",
    "Metadata",
    "ModelSpec",
    "Plan",
    "PlanOptions",
    "Request",
    "discover",
    "get_engine",
]
