"""Moves bytes; knows no policy."""
