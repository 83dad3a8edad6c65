"""Transports that move the tensors of a push to engines in other workers."""
