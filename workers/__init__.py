"""Where training runs. Imports nothing, so that the service can read `spec` without torch or ray."""
