"""Engines that run in a process and an environment of their own, because they pin other packages than the trainer.

messages    what crosses between the two processes: JSON, never pickle
devices     environment variables of the processes: threads, GPUs
process     the trainer's side: start, call, stop
instance    a process with what it was started with, so that another can take its place
pool        several instances as one: calls by load, and the dead replaced
server      the other side: answers messages until the pipe ends
"""
