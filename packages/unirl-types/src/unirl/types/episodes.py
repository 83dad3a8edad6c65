"""What samples of several turns or steps say of their episode, in addition to what trains."""

from __future__ import annotations

EPISODE = "episode"
"""Key of a sample's metadata: a mapping with "reward" (the return that the environment gave), "end" (how the episode
ended), the counts of the environment, and for an episode that failed "reason". Texts add "turns" and "transcript"
(messages with "role", "content" and, if they show images, their number as "images"), policies that act "moves",
"decisions" and, where the environment says it, "success"."""
MOVES = "moves"
"""Key of a row's metadata with the moves of a demonstration from its seed: [[numbers in [-1, 1]], ...]."""
