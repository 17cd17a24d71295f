"""Fixtures for every kind of test."""

pytest_plugins = ["support.valkey"]
