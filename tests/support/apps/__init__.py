"""Celery apps that tests start workers of; each reads its broker from the environment."""
