"""Cards: what is known of each method, in one table of the same rows (../board.md)."""
