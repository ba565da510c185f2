"""Which machines make a cluster? Ray on plain boxes, started and supervised: `thinwire up` and `thinwire down`."""
