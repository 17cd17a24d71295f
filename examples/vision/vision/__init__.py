"""A small image service on Celery and brim: `celery -A vision`, `brim worker -A vision`."""

from vision.celery import app

__all__ = ["app"]
