"""Scorers that ask a judge: an endpoint (extra `judge`) or a vision-language model in this process (extra `clip`)."""
