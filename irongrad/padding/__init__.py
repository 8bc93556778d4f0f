"""Exact padding: a step at the sizes of a bucket gives what it gives at the true sizes of its inputs."""
