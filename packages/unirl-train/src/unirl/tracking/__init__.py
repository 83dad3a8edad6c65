"""Where a run's metrics, pictures and summary go. Every tracker implements `unirl.tracking.base.Tracker`."""
