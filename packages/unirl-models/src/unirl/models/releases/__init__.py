"""What released checkpoints are made of: indexes, configurations, and folders of these without weights."""
