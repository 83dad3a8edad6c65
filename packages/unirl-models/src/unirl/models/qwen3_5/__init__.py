"""Qwen3.5: three of four layers are linear attention (Gated DeltaNet), one is gated attention; texts, and images."""
