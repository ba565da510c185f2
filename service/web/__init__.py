"""The page at `/`: its files, the sessions of who has signed in to it, and what browsers are told about answers."""
