"""One decoder for many families: few, large matrix products, and nothing between them that a compiler cannot fuse."""
