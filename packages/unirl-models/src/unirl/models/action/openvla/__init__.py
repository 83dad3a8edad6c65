"""OpenVLA-OFT: a language model that sees by two vision towers and says moves as tokens, a whole chunk at once."""
