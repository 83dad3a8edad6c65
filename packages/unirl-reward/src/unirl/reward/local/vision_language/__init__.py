"""Reward models built on Qwen2-VL (extra `clip`; videos need `video`)."""
