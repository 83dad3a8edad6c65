"""`trainer plan`: how long a step takes, and what would make it shorter."""
