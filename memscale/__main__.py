"""``python -m memscale`` runs the ``memscale`` command with this Python."""

from memscale.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
