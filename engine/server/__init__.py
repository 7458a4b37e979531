"""An instance: an engine behind one socket for routers and one HTTP port for people and machines that watch it."""
