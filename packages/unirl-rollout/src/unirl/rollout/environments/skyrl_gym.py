"""Text environments of SkyRL's gym, by their id."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.rollout.environments.base import Step, Task
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.turns.calls import Turn
from unirl.types.messages import Message


class SkyRLGym(TextEnvironment):
    """An environment that is registered with skyrl-gym 0.4.

    id: as registered, such as "gsm8k_multi_turn". module: imported first, to register your own. options: its
        `env_config`. answer_key: key of the row's metadata that is the ground truth. max_turns: after which the
        environment ends an episode; it counts as truncated unless that turn has a reward.
    The row's metadata is passed as `extra_info`. Raises RuntimeError if it answers with another text than the model
    wrote (`postprocessed_action`): what is trained on is what was sampled; stop the turn by
    sampling.stop_token_ids instead.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 - the name that the library uses
        *,
        module: str | None = None,
        options: Mapping[str, Any] | None = None,  # Any: of the environment
        answer_key: str = "answer",
        max_turns: int = 8,
    ) -> None:
        self._id = id
        self._module = module
        self._options = dict(options or {})
        self._answer_key = answer_key
        self._max_turns = max_turns

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Make the environment and let it read the prompt, which it may replace."""
        try:
            skyrl_gym = importlib.import_module("skyrl_gym")
        except ImportError as error:
            raise ImportError("environments of SkyRL need skyrl-gym: pip install skyrl-gym==0.4.0") from error
        if self._module is not None:
            importlib.import_module(self._module)
        extras = {
            "reward_spec": {"ground_truth": task.get(self._answer_key)},
            "max_turns": self._max_turns,
            "extra_info": dict(task),
        }
        self._own = skyrl_gym.make(self._id, env_config=self._options, extras=extras)
        self._num_turns = 0
        asked = [{"role": "user", "content": task["prompt"]}]
        said, _ = self._own.init(asked)
        return () if said == asked else tuple(Message(each["role"], each["content"]) for each in said[-1:])

    def step(self, action: Turn) -> Step[Sequence[Message]]:
        """Pass on what the model wrote."""
        self._num_turns += 1
        out = self._own.step(action.text)
        rewritten = out.get("postprocessed_action")
        if rewritten is not None and rewritten != action.text:
            raise RuntimeError(
                f"the environment {self._id} replaces what the model wrote, which cannot be trained on. End turns with "
                "sampling.stop_token_ids instead."
            )
        done = bool(out["done"])
        is_cut = done and self._num_turns >= self._max_turns and out["reward"] <= 0
        messages = tuple(Message(each["role"], each["content"]) for each in out["observations"])
        return Step(messages, reward=float(out["reward"]), terminated=done and not is_cut, truncated=is_cut)

    def close(self) -> None:
        """Close it."""
        self._own.close()
