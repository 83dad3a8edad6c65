"""Tools over the Model Context Protocol."""
