"""Rehearses recipes on a device without float64: by recipe, places that make tensors of float64 there, as JSON. A
separate process, since a rehearsal registers a device for good.

    python narrow_device.py [--wide] RECIPE ...

--wide: the device has float64.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from unirl.app.command_line import Command
from unirl.app.environment import prepare_process
from unirl.app.recipe import composed
from unirl.app.rehearsal.command import USUAL_BYTES, for_devices, rehearsed
from unirl.rehearsal.ledger import Ledger
from unirl.rehearsal.mode import own_place
from unirl.types import device_kinds
from unirl.types.devices import has_values


def main() -> None:
    """Rehearse each, and tell the innermost line of ours for every tensor of float64."""
    places: set[str] = set()
    count = Ledger.made

    def made(self: Ledger, tensors: Iterable[Tensor]) -> None:
        kept = list(tensors)
        if any(each.dtype == torch.float64 and not has_values(each.device) for each in kept):
            own = (own_place(frame.filename, frame.lineno) for frame in reversed(traceback.extract_stack()))
            places.add(next((place for place in own if place is not None and "rehearsal" not in place), "a library"))
        count(self, kept)

    Ledger.made = made
    device_kinds._PRETENDED = replace(device_kinds._PRETENDED, has_float64="--wide" in sys.argv)
    prepare_process()
    found = {}
    for recipe in (each for each in sys.argv[1:] if each != "--wide"):
        config = composed(Command("rehearse", recipe, (f"device={device_kinds.USUAL}",)))
        rehearsed(for_devices(config), USUAL_BYTES)
        found[recipe] = sorted(places)
        places.clear()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
