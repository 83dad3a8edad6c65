"""Conversations: the model writes a turn, an environment answers, until the episode ends."""
