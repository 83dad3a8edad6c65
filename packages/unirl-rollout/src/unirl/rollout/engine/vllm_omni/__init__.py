"""Latents from vLLM-Omni's transformers, in a separate process and environment.

engine      the trainer's side
families    supported model families: which tensors are sent
rules       recipe rules
messages    messages besides those that all engines share
server, host    the engine's side, run by the interpreter that has vLLM-Omni
sampling    the denoising loop inside vLLM-Omni's workers, shared by our custom pipelines
pipeline, bagel, hunyuan_image3    custom pipelines of transformers and of the two unified models
transformers    how vLLM-Omni's transformers of each family are called
worker_ext  weight-push methods of the workers
"""
