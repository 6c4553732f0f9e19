"""Data that models make: answers to prompts, ratings of answers, critiques and revisions."""
