"""Task sets of the verifiers library (0.4): its agent plays in another process, and asks our model over an endpoint."""
