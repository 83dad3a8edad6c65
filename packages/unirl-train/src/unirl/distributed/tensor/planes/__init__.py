"""How samples move from worker to worker: Ray objects, Ray Direct Transport, or TransferQueue."""
