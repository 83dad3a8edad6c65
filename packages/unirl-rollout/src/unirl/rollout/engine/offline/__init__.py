"""The engine that takes given images instead of sampling: preference data from a file."""
