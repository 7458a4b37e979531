"""Targets of the connectors that come with pdserve: a module for each, called as the connector is registered."""
