"""``baton doctor``: what a machine or pod has and lacks for the services that are to run on it."""
