"""The sampling loop: host policy apart from device work."""
