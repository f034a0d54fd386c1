"""Local training of many users in one pass over shared frozen weights."""
