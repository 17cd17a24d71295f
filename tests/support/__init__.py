"""Helpers that tests of several kinds share."""
