"""Device code that families share."""
