"""What a worker reports: metrics to be scraped, history and events in the run folder and at the service."""
