"""The device mesh, its partitions, and moving arrays between them."""
