"""The engine that plays episodes: the policy that trains acts in an environment, nothing to sync, replay is exact."""
