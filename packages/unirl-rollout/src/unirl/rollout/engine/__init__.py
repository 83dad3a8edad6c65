"""One folder an engine. `trainside` samples with the training model itself."""
