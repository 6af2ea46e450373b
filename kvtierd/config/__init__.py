"""Settings: their schema, where each value came from, and every mistake in them."""
