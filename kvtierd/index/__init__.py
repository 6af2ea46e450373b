"""The page table and the block table: block key to residency, in columns."""
