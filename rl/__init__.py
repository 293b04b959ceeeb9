"""Training of memory agents with the engine itself as the rollout."""
