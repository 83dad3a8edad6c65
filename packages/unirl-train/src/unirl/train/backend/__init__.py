"""Backends: they own the trainable parameters, their optimizer and how both are spread over devices."""
