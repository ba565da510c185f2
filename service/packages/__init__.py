"""The packages of scripts that the service keeps: what may come in, where it lies, when it goes."""
