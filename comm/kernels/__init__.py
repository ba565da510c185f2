"""The inner loops of the codecs, one interface, several implementations held against `reference`."""
