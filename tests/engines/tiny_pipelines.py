"""A random Qwen-Image of two layers that engines run natively, from the table of families."""

import importlib
from pathlib import Path
from typing import Any

from unirl.models.tiny.saving import save_random

# Any, below: classes of diffusers.
_qwen_image: Any = importlib.import_module("packages.unirl-models.tests.families.qwen_image")
_kit: Any = importlib.import_module("packages.unirl-models.tests.families.kit")


def save_qwen_image(folder: Path) -> Path:
    """As in the table of families."""
    save_random(_kit.seeded(_qwen_image.tiny), folder)
    return folder
