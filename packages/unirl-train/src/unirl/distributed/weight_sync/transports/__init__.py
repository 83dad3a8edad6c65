"""How the tensors of a push cross to engines in other workers."""
