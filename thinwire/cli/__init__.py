"""The command `thinwire`: a client of the service, the quickstart, and the doors to lab, drill and bench."""
