"""Decides who goes first, where, and at whose cost. Standard library and msgspec only."""
