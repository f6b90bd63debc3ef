"""A step that never ran: its memory and its time."""
