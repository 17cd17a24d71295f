"""brim: a GPU-memory-aware scheduler for Celery."""

__version__ = "0.1.0"
