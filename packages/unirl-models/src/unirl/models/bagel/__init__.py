"""BAGEL: one transformer that reads text and images, writes text and makes images."""
