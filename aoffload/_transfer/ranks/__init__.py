"""One transport over several ranks: a plan goes to every rank, and is over when all ranks have finished it."""
