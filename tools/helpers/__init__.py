"""Helpers of the tools; nothing here is started from a terminal."""
