"""People: their tokens, and the audit of what they change."""
