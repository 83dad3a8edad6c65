"""What one device does with a few recipes, next to what a rehearsal says of them."""
