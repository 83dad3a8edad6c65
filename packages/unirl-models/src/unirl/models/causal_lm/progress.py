"""Progress bars of loading, for commands that want their own lines first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def delay_loading_bars(delay_s: float) -> None:
    """Let transformers show its bars ("Loading weights") only where loading takes longer than `delay_s`.

    For the whole process. Does nothing without transformers.
    """
    try:
        from transformers.utils import logging as transformers_logging
    except ModuleNotFoundError:
        return

    # Any: the arguments of tqdm, which transformers hands over as they are.
    def delayed(factory: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return factory(*arguments, **{"delay": delay_s, **keywords})

    transformers_logging.set_tqdm_hook(delayed)
