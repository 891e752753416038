"""Starting and keeping running: the command line, the supervisor and its children."""
