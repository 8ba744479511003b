"""What several tools share, or a long one needs: nothing here is started from a terminal."""
