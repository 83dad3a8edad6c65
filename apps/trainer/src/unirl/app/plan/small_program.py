"""Seconds of a model so small that its time is the host's: the Python of a model library, autograd and dispatch.

python -m unirl.app.plan.small_program DEVICE prints them. In a process with the pretend device autograd takes that for
torch's accelerator, and runs no backward on another one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch

from unirl.app.environment import prepare_process
from unirl.app.meters import Meter, meter_of
from unirl.types.devices import is_accelerator
from unirl.types.errors import UniRLError, as_sentence

NUM_TOKENS = 4
REPEATS = 25


def small_step(device: torch.device) -> Callable[[], None]:
    """Forward and backward of a few layers on a device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    with device:
        model = Qwen3ForCausalLM(config)
        tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long)

    def run() -> None:
        model(tokens, use_cache=False).logits.square().mean().backward()

    return run


def small_step_s(meter: Meter) -> float:
    """Mean seconds of `small_step` on the device of a meter; of an accelerator measured in another process.

    Raises UniRLError with what that process wrote if it fails.
    """
    if not is_accelerator(meter.device):
        return measured_s(meter)
    command = [sys.executable, "-m", __name__, str(meter.device)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this module
    if done.returncode:
        raise UniRLError(f"{' '.join(command[1:])} ended with {done.returncode}: {as_sentence(done.stderr[-2000:])}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def measured_s(meter: Meter) -> float:
    """Mean seconds of `small_step` in this process."""
    step = small_step(meter.device)
    step()
    found: list[float] = []
    for _ in range(REPEATS):
        with meter.measuring() as spent:
            step()
        found.append(spent.seconds)
    return statistics.mean(found)


if __name__ == "__main__":
    prepare_process()
    sys.stdout.write(json.dumps(measured_s(meter_of(sys.argv[1]))) + "\n")
