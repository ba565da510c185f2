"""What all rooms agree on, without torch: what a user asks for, what a worker reports, and where a run leaves it.

spec           the job file: everything a user may ask for
jobs           a job as the REST API shows it, and its states
summary        how a run went that succeeded
reports        what a running job says back to the service
run_folder     which file of a run is where
metric_names   what a worker exports to Prometheus
files          how a file is written whole or not at all
"""
