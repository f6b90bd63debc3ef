"""``python -m memscale.cli`` is the ``memscale`` command."""

import sys

from memscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
