"""Text from vLLM, which runs in a process and an environment of its own (its torch is not the trainer's).

engine      what the trainer talks to: requests, sleep, wake, weights
messages    what crosses between the two processes, beside what engines share
server, host, worker_ext    the other side, run by the interpreter that has vLLM
"""
