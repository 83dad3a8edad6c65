"""The command lines of the scripts that make checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def make_checkpoint(
    pretrain: Callable[..., None], budget: type[Any], description: str | None, *, has_snapshots: bool = True
) -> None:
    """Read a command line and call `pretrain(out, seed=..., budget=...)`.

    budget: a dataclass of the optimiser steps of each stage, all with defaults; its field `text` is read from
    --text-steps. has_snapshots: whether `pretrain` takes `snapshot_every`, too.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    stages = [(field.name, f"{field.name}_steps") for field in dataclasses.fields(budget)]
    for stage, option in stages:
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, default=getattr(budget, stage))
    if has_snapshots:
        every = "also save and judge every N transformer steps"
        parser.add_argument("--snapshot-every", type=int, default=0, metavar="N", help=every)
    arguments = vars(parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    torch.set_num_threads(1)
    options = {name: arguments[name] for name in ("seed", "snapshot_every") if name in arguments}
    pretrain(arguments["out"], budget=budget(**{stage: arguments[option] for stage, option in stages}), **options)
