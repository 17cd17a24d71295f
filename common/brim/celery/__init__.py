"""The Celery face of brim: routing, the wire format, and what runs inside workers."""
