"""The engine that samples with the training model: nothing to sync, replay is exact."""
