"""A small BAGEL that plans an image of shapes in words and then draws its plan."""
