"""People's phrases for the images of the shapes world, and a writer that puts them into the painter's words."""
