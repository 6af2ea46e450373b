"""`kvtierctl stress`: a long context through small tiers, every byte and every sum of it checked."""
