"""Damage: to the messages between a connector's halves, to bytes on the wire, to peers in other processes."""
