"""brim's processes: thin entry points over the library."""
