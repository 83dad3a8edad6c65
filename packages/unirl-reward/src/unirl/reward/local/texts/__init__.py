"""Rules on generated texts; only math-verify needs an extra (`math`)."""
