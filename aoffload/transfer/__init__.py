"""Moving bytes: the only room, with `integrations`, that knows torch."""
