"""Images, audio and video in records: found, checked, decoded, and laid out for models."""
