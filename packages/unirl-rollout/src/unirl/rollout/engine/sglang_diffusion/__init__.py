"""Latents from SGLang Diffusion's native backend, in a process and an environment of its own.

engine      what the trainer talks to
families    model families that it serves: names and layouts of their tensors
rules       what it needs of a recipe
messages    what crosses between the two processes, beside what engines share
server, host    the other side, run by the interpreter that has SGLang
worker_ext  what runs inside SGLang's workers, by its entry point for plugins
"""
