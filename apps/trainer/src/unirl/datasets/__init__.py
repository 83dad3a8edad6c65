"""Sets of prompts that recipes name: where they come from, and how they are made into files that a recipe reads."""
