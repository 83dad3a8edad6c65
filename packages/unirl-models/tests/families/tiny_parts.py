"""Random text encoders, tokenizers and schedulers that several families share. Any: classes of both libraries."""

from typing import Any

import diffusers


def dynamic_scheduler(**changes: Any) -> Any:
    """Flow matching whose shift follows the resolution."""
    fields: dict[str, Any] = {
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "shift": 1.0,
        "use_dynamic_shifting": True,
        "time_shift_type": "exponential",
    }
    return diffusers.FlowMatchEulerDiscreteScheduler(**fields | changes)
