"""Qwen2.5-VL and Qwen3-VL: language models that see any number of images per prompt."""
