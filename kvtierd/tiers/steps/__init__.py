"""What a request does to the tiers, as one compiled function for each operation."""
