"""Texts from language models in other processes: requests, answers and their checks.

call      requests and answers as plain values, split and joined, and checks of answers: pure functions
engine    the trainer's side, as far as all engines share it
"""
