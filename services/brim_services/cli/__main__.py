"""``python -m brim_services.cli`` is ``brim``."""

from . import main

if __name__ == "__main__":
    main()
