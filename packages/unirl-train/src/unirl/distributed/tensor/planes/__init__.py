"""Data planes that move samples from worker to worker: Ray objects, Ray Direct Transport, or TransferQueue."""
