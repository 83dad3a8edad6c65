"""Small policies that act: what they see becomes a chunk of moves, by a flow or by bins."""
