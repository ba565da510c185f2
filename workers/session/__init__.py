"""A training loop that a person has written, on the same course as the built-in recipes: see thinwire.train."""
