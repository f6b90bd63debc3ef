"""What a region depends on, and how it is run again."""
