"""vLLM-Omni's process. Run as `python -m unirl.rollout.engine.vllm_omni.server FD FOLDER`."""

from __future__ import annotations

from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.child.server import Aborts, Host, main
from unirl.rollout.engine.vllm_omni.messages import CODEC


def make_host(start: Start, aborts: Aborts) -> Host:
    """The engine that a message asks for. Imports vLLM-Omni, which takes a while: the pipe comes first."""
    from unirl.rollout.engine.vllm_omni.host import EngineHost

    return EngineHost(start)


if __name__ == "__main__":
    main(CODEC, make_host)
