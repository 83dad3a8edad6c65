"""Where a run's metrics, images and summary go. Every tracker implements `unirl.tracking.base.Tracker`."""
