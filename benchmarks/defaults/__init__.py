"""With default settings only: losses of each compressed optimizer beside its dense one, and bytes. Fifteen tasks."""
