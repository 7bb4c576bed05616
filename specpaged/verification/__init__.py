"""Which drafts stand, and the token that follows them."""
