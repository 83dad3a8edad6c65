"""Text from an SGLang server, over its own HTTP interface.

engine      the trainer's side: starts the servers
instance    one server: translates messages to its interface
request, response    bodies of SGLang's requests and answers: pure functions
server      the HTTP calls, and the server process if we start it
keeper      ends that process when the trainer ends
"""
