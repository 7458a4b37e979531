"""The HTTP side of the router: request types, their checks, and the answers' shapes."""
