"""``python -m memscale``: the command, of whichever Python is asked."""

from memscale.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
