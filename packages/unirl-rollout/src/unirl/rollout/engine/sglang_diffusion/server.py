"""Entry point of SGLang Diffusion's process. Run as `python -m unirl.rollout.engine.sglang_diffusion.server FD
FOLDER`."""

from __future__ import annotations

from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.child.server import Aborts, Host, main
from unirl.rollout.engine.sglang_diffusion.messages import CODEC


def make_host(start: Start, aborts: Aborts) -> Host:
    """Make the host. SGLang is imported here, after the pipe is open, because that is slow."""
    from unirl.rollout.engine.sglang_diffusion.host import EngineHost

    return EngineHost(start)


if __name__ == "__main__":
    main(CODEC, make_host)
