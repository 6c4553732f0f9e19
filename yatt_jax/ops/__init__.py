"""Pure maths, one idea a file."""
