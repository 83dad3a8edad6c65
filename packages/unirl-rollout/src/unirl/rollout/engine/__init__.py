"""One folder per engine. `trainside` samples with the training model itself."""
