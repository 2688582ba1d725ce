"""`slicewise provision` as it runs beside the head: command line, process, ways to Ray."""
