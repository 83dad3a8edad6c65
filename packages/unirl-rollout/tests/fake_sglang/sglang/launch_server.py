"""Stands for `python -m sglang.launch_server`: the server of `sglang_fakes` as a process.

The process that removes the file `die` from the folder FAKE_CONTROL while it has samples to draw is killed.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from sglang_fakes import SGLangFake  # noqa: E402 - in the folder of the tests


class DyingFake(SGLangFake):
    """Dies when asked to."""

    def generate(self, body):
        """The base class's answer, unless the process is told to die."""
        if any(params["temperature"] for params in body["sampling_params"]):
            self.die_if_asked()
        return super().generate(body)

    def die_if_asked(self):
        """Kill this process if it is the one that removes the file."""
        try:
            Path(os.environ["FAKE_CONTROL"], "die").unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--model-path", type=Path)
    options, _ = parser.parse_known_args()
    fake = DyingFake(options.port)
    fake.weights = load_file(options.model_path / "model.safetensors")
    fake.thread.join()
