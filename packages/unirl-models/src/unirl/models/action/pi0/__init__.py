"""pi0: a vision-language model that reads, and an expert that draws chunks of moves by flow matching."""
