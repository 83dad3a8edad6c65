"""Workers as Ray actors: the devices of a cluster, blocks of them, and the runtime that calls components there."""
