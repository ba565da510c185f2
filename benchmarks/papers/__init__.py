"""What the papers published, beside what was measured here and what the model forecasts for their clusters."""
