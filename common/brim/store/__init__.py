"""Redis: brim's state and its transitions, each one Lua script."""
