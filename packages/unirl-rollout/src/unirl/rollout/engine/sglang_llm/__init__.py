"""Text from an SGLang server, over its own HTTP interface.

engine      what the trainer talks to: how servers are started
instance    one server: what the trainer's messages are in its interface
request     what SGLang is sent, and response, what it answers; pure functions
server      the HTTP calls, and the server process where we start it
keeper      ends that process with the trainer's
"""
