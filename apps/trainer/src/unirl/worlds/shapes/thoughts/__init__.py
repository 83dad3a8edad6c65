"""A small BAGEL that plans a picture of shapes in words and then draws its plan."""
