"""One policy that writes and draws."""
