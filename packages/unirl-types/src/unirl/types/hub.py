"""Names of models on the hub, told from paths without asking the hub."""

from __future__ import annotations

import re

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """True if `name` has the form owner/name. A relative path of two parts has it too: look for the folder first."""
    return _HUB_ID.fullmatch(name) is not None
