"""Texts from language models in other processes: what such engines take, give back and must prove.

call      requests and answers as plain values, cut and joined, and what is verified of an answer: pure functions
engine    the trainer's side, without what one engine alone knows
"""
