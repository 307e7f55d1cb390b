"""Several ranks behind one transport: a plan goes to every rank, and is over when all ranks have finished it."""
