"""Generated training tasks: documents from (seed, index), of any length, with an exact oracle."""
