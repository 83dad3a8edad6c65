"""People's phrases for the pictures of the shapes world, and a writer that puts them into the painter's words."""
