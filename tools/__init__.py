"""What sits on top of the rooms: the build step, certification, and the command line."""
