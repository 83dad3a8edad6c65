"""AnyFlow FAR: videos chunk by chunk, in a few steps each, by a flow map on the blocks of Wan 2.1."""
