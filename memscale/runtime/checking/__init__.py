"""Races between copies, found whether or not they went wrong."""
