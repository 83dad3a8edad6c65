"""What a large policy that acts needs. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.models.action.rules import no_adapters

RULES = (no_adapters,)
