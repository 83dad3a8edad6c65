"""Latents from SGLang Diffusion's native backend, in a separate process and environment.

engine      the trainer's side
families    supported model families: names and layouts of their tensors
rules       recipe rules
messages    messages besides those that all engines share
server, host    the engine's side, run by the interpreter that has SGLang
worker_ext  hooks inside SGLang's workers, loaded by its plugin entry point
"""
