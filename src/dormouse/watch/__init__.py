"""A node as somebody who watches it sees it: a picture, and then what changes."""
