"""Training: slices, the stack that owns backward, the FSDP2 backend, checkpoints."""
