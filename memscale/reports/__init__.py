"""Profiles for people: text, pictures, a page."""
