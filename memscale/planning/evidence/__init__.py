"""What is returned: a plan with the evidence for it, as data and as text, and several of them as a frontier."""
