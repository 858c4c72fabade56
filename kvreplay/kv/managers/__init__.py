"""How one group's blocks are found, allocated, cached and freed: a manager for each kind of group."""
