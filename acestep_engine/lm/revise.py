"""Changes to a plan by hand. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from ..types import Plan, Request
from .metadata import FIELDS, normalise, stated


def revise(plan: Plan, change: Request, cleared: Collection[str] = ()) -> Plan:
    """`plan` with what `change` states in place of its own, and without the fields in `cleared`.

    A new caption also stands for the rewritten one. What `change` leaves empty stays.
    """
    change = normalise(change)
    facts = stated(change)
    news = {name: value for name in FIELDS if (value := getattr(facts, name)) is not None}
    news |= dict.fromkeys(cleared)
    if change.caption:
        news["caption"] = None
    duration = change.duration or plan.duration
    news["duration"] = math.ceil(duration)
    return replace(
        plan,
        caption=change.caption or plan.caption,
        lyrics=change.lyrics or plan.lyrics,
        metadata=replace(plan.metadata, **news),
        duration=duration,
    )
