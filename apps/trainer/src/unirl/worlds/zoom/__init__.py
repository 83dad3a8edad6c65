"""A small vision-language model that learns when to look closer."""
