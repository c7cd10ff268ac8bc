"""Deployment: launchers, registry drivers, supervision."""
