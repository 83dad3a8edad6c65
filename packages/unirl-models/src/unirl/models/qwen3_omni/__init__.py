"""Qwen3-Omni's Thinker: a mixture of experts that sees images and hears a sound, and writes."""
