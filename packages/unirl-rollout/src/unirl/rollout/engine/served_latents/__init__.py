"""Latents from diffusion engines in other processes: requests, answers and their checks.

call      requests and answers as plain values and tensors, and what is verified of an answer: pure functions
folder    which pipeline a checkpoint holds
tokens    latents as tokens, and back
rules     what such engines need of a recipe
engine    the trainer's side, as far as all engines share it
"""
