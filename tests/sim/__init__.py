"""Tests of the simulated world."""
