"""Text from vLLM, which runs in a separate process and environment (its torch is not the trainer's).

engine      the trainer's side: requests, sleep, wake, weights
messages    messages besides those that all engines share
server, host, worker_ext    the engine's side, run by the interpreter that has vLLM
"""
