"""A notebook-first sandbox for the Dion family of optimizers on small GPT models."""
