"""Several ranks behind one transport: plans go to every one of them, a job is over when all of them are."""
