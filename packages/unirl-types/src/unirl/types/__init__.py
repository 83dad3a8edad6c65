"""The typed boundary between rollout, reward and training. Depends on torch alone.

Start with `unirl.types.rollout` (request, response, track) and `unirl.types.segments` (what a track holds).
"""
