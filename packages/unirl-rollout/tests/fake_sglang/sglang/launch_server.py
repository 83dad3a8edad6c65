"""Stands for `python -m sglang.launch_server`: the server of `sglang_fakes` as a process.

In the folder FAKE_CONTROL, who removes `die` while it has samples to draw does not survive them.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from sglang_fakes import SGLangFake  # noqa: E402 - beside the tests


class DyingFake(SGLangFake):
    """Dies where it is asked to."""

    def generate(self, body):
        """As the others do, who survive it."""
        if any(params["temperature"] for params in body["sampling_params"]):
            self.die_if_asked()
        return super().generate(body)

    def die_if_asked(self):
        """Kill the process where the file is there, which one process removes."""
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
