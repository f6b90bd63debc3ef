"""What templates write figures with."""
