"""Stage 1: initial cluster models from tiny private summaries of a rank-1 update."""
