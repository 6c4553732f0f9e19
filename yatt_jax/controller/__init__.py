"""The loops, and everything a process needs to run them."""
