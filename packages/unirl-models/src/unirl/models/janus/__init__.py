"""Janus-Pro: a language model that draws images token by token."""
