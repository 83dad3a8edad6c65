"""What samples of several turns or steps say of their episode, in addition to what trains."""

from __future__ import annotations

EPISODE = "episode"
"""Key of a sample's metadata: a mapping with "reward" (the return that the environment gave), "turns", "end" (how the
episode ended), "transcript", the counts of the environment, and for an episode that failed "reason"."""
