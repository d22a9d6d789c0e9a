"""A tiny decoder whose attention is computed by attnd, forward and backward, and an honest look at what it learned."""
