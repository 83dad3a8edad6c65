"""A local web page over run directories: `trainer view`. Reads files alone, and writes none."""
