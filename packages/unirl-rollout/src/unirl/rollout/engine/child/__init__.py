"""Engines that run in a separate process and environment, because they pin other packages than the trainer.

messages    what crosses between the two processes: JSON, never pickle
devices     environment variables of the processes: threads, GPUs
process     the trainer's side: start, call, stop
instance    one engine process and its start arguments, so that it can be restarted
server      the engine's side: answers messages until the pipe closes
"""
