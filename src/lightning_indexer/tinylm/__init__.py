"""The demo model."""
