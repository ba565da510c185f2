"""Jobs: from the request to the end of the run."""
