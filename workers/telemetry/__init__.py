"""What a worker tells: metrics to be scraped, history and events in the run folder and at the service, the summary."""
