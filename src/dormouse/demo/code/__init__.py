"""Code that the demo deploys by name; its folder is what the server is allowed to import from."""
