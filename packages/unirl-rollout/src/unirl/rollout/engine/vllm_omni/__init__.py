"""Latents from vLLM-Omni's transformers, in a process and an environment of its own.

engine      what the trainer talks to
families    model families that it serves: which tensors cross
rules       what it needs of a recipe
messages    what crosses between the two processes, beside what engines share
server, host    the other side, run by the interpreter that has vLLM-Omni
sampling    the loop inside vLLM-Omni's workers, of all custom pipelines of it
pipeline    that of transformers; bagel, hunyuan_image3    those of unified models
transformers    how vLLM-Omni's transformers of each family are called
worker_ext  what pushes ask of the workers, as a worker extension of vLLM-Omni
"""
