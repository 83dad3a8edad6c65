"""Pools of workers whose members come and go."""
