"""What the tools stand on, for who changes one. Nothing here is started from a terminal."""
